// Where keys and values of a KV head stand in the pools [pages, heads, page_size, width].
#pragma once

#include "../../_device/types.cuh"

// The row of slot `slot`, which is on page `page`. `share` of the kernel's `kv_heads`, each with up
// to 8 query heads, are one of the pools', whose query heads are too many for half an mma.
template <int kv_heads, int share, int page_size, class Page, class Head, class Slot>
__device__ __forceinline__ Page pool_row_of(Page page, Head kv_head, Slot slot) {
  static_assert(kv_heads % share == 0, "heads of the pools are whole");
  return (page * (kv_heads / share) + kv_head / share) * page_size +
         static_cast<Page>(slot % page_size);
}
