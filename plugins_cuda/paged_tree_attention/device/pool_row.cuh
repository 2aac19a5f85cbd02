// The rows of the pools [pages, heads, page_size, width] with a KV head's keys and values.
#pragma once

#include "../../_device/types.cuh"

// Return the row of slot `slot`, which is on page `page`. If a KV head has too many query heads for
// half an mma, it counts as `share` of the kernel's `kv_heads`, each with up to 8 query heads.
template <int kv_heads, int share, int page_size, class Page, class Head, class Slot>
__device__ __forceinline__ Page pool_row_of(Page page, Head kv_head, Slot slot) {
  static_assert(kv_heads % share == 0, "KV heads of the pools are complete");
  return (page * (kv_heads / share) + kv_head / share) * page_size +
         static_cast<Page>(slot % page_size);
}
