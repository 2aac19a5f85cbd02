// A stand-in for libcuda that works on host memory and prints what is launched, so that the
// wrapper around cuda-bindings can be tested where there is no GPU.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t Address;
typedef struct {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  int* attributes;  // of each: id, padding, then a union that starts with an int
  unsigned attribute_count;
} LaunchConfig;

enum { OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_IMAGE = 200 };
static void* const kContext = (void*)0x10;

int cuInit(unsigned flags) {
  return getenv("STUB_NO_DEVICE") ? NO_DEVICE : 0;
}
int cuDriverGetVersion(int* version) {
  return *version = 12080, 0;
}
int cuGetErrorName(int status, const char** name) {
  *name = status == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_OTHER";
  return 0;
}
int cuGetErrorString(int status, const char** text) {
  return *text = "a reason", 0;
}
int cuDeviceGetCount(int* count) {
  return *count = 1, 0;
}
int cuDeviceGet(int* device, int ordinal) {
  return *device = ordinal, 0;
}
int cuDeviceGetName(char* name, int room, int device) {
  return strncpy(name, "Stub", room), 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75 ? 9 : attribute == 16 ? 132 : 0;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  return *context = kContext, 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
  return printf("close\n"), 0;
}
int cuCtxSetCurrent(void* context) {
  return context != kContext;
}
int cuMemGetInfo_v2(size_t* free, size_t* total) {
  return *free = 3u << 30, *total = 4u << 30, 0;
}
int cuMemAlloc_v2(Address* address, size_t bytes) {
  if (bytes > 3u << 30) return OUT_OF_MEMORY;
  return *address = (Address)aligned_alloc(512, (bytes + 511) / 512 * 512), 0;
}
int cuMemFree_v2(Address address) {
  return free((void*)address), 0;
}
int cuMemHostAlloc(void** address, size_t bytes, unsigned flags) {
  *address = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return flags != 3;  // portable and mapped
}
int cuMemFreeHost(void* address) {
  return free(address), 0;
}
int cuMemHostGetDevicePointer_v2(Address* device, void* host, unsigned flags) {
  return *device = (Address)host, 0;
}
int cuStreamCreate(void** stream, unsigned flags) {
  return *stream = malloc(8), flags != 1;
}
int cuStreamSynchronize(void* stream) {
  return 0;
}
int cuMemsetD32Async(Address address, unsigned word, size_t words, void* stream) {
  for (size_t i = 0; i < words; i++) ((unsigned*)address)[i] = word;
  return 0;
}
int cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, void* stream) {
  return memcpy((void*)to, from, bytes), 0;
}
int cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, void* stream) {
  return memcpy(to, (void*)from, bytes), 0;
}
int cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, void* stream) {
  return memcpy((void*)to, (void*)from, bytes), 0;
}
int cuEventCreate(void** event, unsigned flags) {
  return *event = malloc(8), printf("event %u\n", flags), 0;
}
int cuEventRecord(void* event, void* stream) {
  return 0;
}
int cuEventSynchronize(void* event) {
  return 0;
}
int cuEventElapsedTime(float* milliseconds, void* first, void* last) {
  return *milliseconds = 2.5f, 0;
}
int cuModuleLoadData(void** module, const char* image) {
  *module = (void*)0x77;
  return memcmp(image, "cubin", 5) ? INVALID_IMAGE : 0;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  return *function = (void*)0x88, printf("function %s\n", name), 0;
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  return printf("attribute %d %d\n", attribute, value), 0;
}
int cuLaunchKernelEx(const LaunchConfig* c, void* function, void** arguments, void** extra) {
  printf("launch %u,%u,%u %u,%u,%u %u", c->grid[0], c->grid[1], c->grid[2], c->block[0],
         c->block[1], c->block[2], c->shared_bytes);
  if (c->attribute_count) printf(" attribute %d=%d", c->attributes[0], c->attributes[2]);
  printf(" arguments %lx %d\n", *(uint64_t*)arguments[0], *(int*)arguments[1]);
  return 0;
}
int cuStreamBeginCapture_v2(void* stream, int mode) {
  return printf("capture %d\n", mode), 0;
}
int cuStreamEndCapture(void* stream, void** graph) {
  return *graph = (void*)0x99, 0;
}
int cuGraphInstantiateWithFlags(void** exec, void* graph, unsigned long long flags) {
  return *exec = (void*)0xaa, graph != (void*)0x99;
}
int cuGraphDestroy(void* graph) {
  return graph != (void*)0x99;
}
int cuGraphUpload(void* exec, void* stream) {
  return exec != (void*)0xaa;
}
int cuGraphLaunch(void* exec, void* stream) {
  return printf("graph\n"), exec != (void*)0xaa;
}
int cuGraphExecDestroy(void* exec) {
  return exec != (void*)0xaa;
}

int cuGetProcAddress_v2(const char* symbol, void** function, int version, uint64_t flags,
                        int* status) {
  static const char* const kSuffixes[] = {"_v2", "WithFlags", ""};
  void* self = dlopen("libcuda.so.1", RTLD_NOW);
  *function = NULL;
  for (int i = 0; i < 3 && !*function; i++) {
    char name[256];
    snprintf(name, sizeof name, "%s%s", symbol, kSuffixes[i]);
    *function = dlsym(self, name);
  }
  if (status) *status = *function ? 0 : 1;
  return *function ? 0 : 500;
}
int cuGetProcAddress(const char* symbol, void** function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
