// fake_driver.cpp -- TEST ONLY. As much of libcuda.so as evermoe's launchers call, on top of emulator.cpp: device
// addresses are host addresses, kernels are functions of this library, everything is synchronous.
#include "emulator.h"
#include <cstdio>

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
