// fake_driver.cpp -- TEST ONLY. As much of libcuda.so as evermoe's launchers call, on top of emulator.cpp: device
// addresses are host addresses, kernels are functions of this library, everything is synchronous.
#include "emulator.h"
#include <cstdio>
#include <cstdlib>

extern "C" {
int cuInit(unsigned) { return 0; }
int cuDeviceGet(int* device, int) { return *device = 0; }
int cuDeviceGetAttribute(int* value, int, int) { return *value = 0; }
int cuDevicePrimaryCtxRetain(void** context, int) { *context = reinterpret_cast<void*>(1); return 0; }
int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuCtxGetCurrent(void** context) { *context = reinterpret_cast<void*>(1); return 0; }
int cuMemsetD8Async(uint64_t address, unsigned char byte, size_t count, void*) {
  memset(reinterpret_cast<void*>(address), byte, count);
  return 0;
}
int cuMemHostAlloc(void** start, size_t count, unsigned) { return posix_memalign(start, 4096, count) ? 2 : 0; }
int cuMemFreeHost(void* start) { free(start); return 0; }
int cuMemHostRegister_v2(void*, size_t, unsigned) { return 0; }
int cuMemHostUnregister(void*) { return 0; }
int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t count, void*) {
  memcpy(reinterpret_cast<void*>(to), from, count);
  return 0;
}
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t count, void*) {
  memcpy(to, reinterpret_cast<const void*>(from), count);
  return 0;
}
int cuCtxGetStreamPriorityRange(int* lowest, int* highest) { *lowest = 0; *highest = -5; return 0; }
int cuStreamCreateWithPriority(void** stream, unsigned, int) { *stream = malloc(1); return 0; }
int cuStreamDestroy_v2(void* stream) { free(stream); return 0; }
int cuStreamSynchronize(void*) { return 0; }
int cuStreamIsCapturing(void*, int* status) { return *status = 0; }
int cuStreamWaitEvent(void*, void*, unsigned) { return 0; }
int cuEventCreate(void** event, unsigned) { *event = malloc(1); return 0; }
int cuEventDestroy_v2(void* event) { free(event); return 0; }
int cuEventRecord(void*, void*) { return 0; }
int cuEventQuery(void*) { return 0; }
int cuEventSynchronize(void*) { return 0; }
int cuModuleLoadData(void** module, const void* image) {
  uint32_t magic;
  memcpy(&magic, image, sizeof magic);
  if (magic != 0xba55ed50) return 200;  // not a fat binary
  *module = reinterpret_cast<void*>(1);  // every module has every kernel
  return 0;
}
int cuModuleUnload(void*) { return 0; }
int cuModuleGetFunction(const void** function, void*, const char* name) {
  *function = emulator::find_kernel(name);
  return *function ? 0 : 500;
}
int cuLaunchKernel(const emulator::Kernel* kernel, unsigned x, unsigned, unsigned, unsigned threads, unsigned, unsigned,
                   unsigned shared, void*, void** parameters, void**) {
  const char* const error = emulator::launch(*kernel, 0, x, threads, shared, parameters, 2);
  if (error) fprintf(stderr, "fake_driver: %s: %s\n", kernel->name, error);
  return error ? 719 : 0;
}
int cuGetErrorName(int, const char** text) { *text = "CUDA_ERROR"; return 0; }
int cuGetErrorString(int, const char** text) { *text = "see the message of fake_driver"; return 0; }
}
