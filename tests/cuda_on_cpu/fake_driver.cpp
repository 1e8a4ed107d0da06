// fake_driver.cpp -- TEST ONLY. As much of libcuda.so as evermoe's launchers call, on top of cuda_on_cpu.cpp: device
// addresses are host addresses, kernels are functions of this library, everything is synchronous.
#include <dlfcn.h>
#include <cstdint>
#include <cstdio>
#include <cstring>

extern "C" {
const char* launch(void*, unsigned, unsigned, size_t, const uint64_t*, size_t, int);

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
  Dl_info here;
  uint32_t magic;
  memcpy(&magic, image, sizeof magic);
  if (magic != 0xba55ed50) return 200;  // not a fat binary
  if (!dladdr(reinterpret_cast<void*>(&cuInit), &here)) return 999;
  *module = dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  return *module ? 0 : 999;
}
int cuModuleUnload(void*) { return 0; }
int cuModuleGetFunction(void** function, void* module, const char* name) {
  *function = dlsym(module, name);
  return *function ? 0 : 500;
}
// Where a kernel's table by value starts among the values, and its greatest size, as in cuda_on_cpu.cpp.
constexpr size_t kTableStart = 5, kTableWords = 192;
// The driver knows which parameters a kernel has; here their names tell: how many, and the words of a table after them.
struct Parameters { size_t count, table_words; };
static Parameters parameters_of(void* function) {
  static const struct { const char* prefix; Parameters parameters; } kTable[] = {
      {"expert_histograms", {3, 192}}, {"plan_count", {4, 0}}, {"plan_segments", {7, 0}}, {"plan_place", {9, 0}},
      {"adamw", {5, 48}}, {"invert_positions", {4, 0}}, {"permute", {7, 0}}, {"unpermute_backward", {10, 0}},
      {"unpermute", {8, 0}}, {"regroup_starts", {5, 0}}, {"regroup", {8, 0}}, {"split_tokens", {7, 0}}};
  Dl_info info;
  if (dladdr(function, &info) && info.dli_sname)
    for (const auto& row : kTable)
      if (!strncmp(info.dli_sname, row.prefix, strlen(row.prefix))) return row.parameters;
  return {0, kTableWords + 1};  // refused by launch
}
int cuLaunchKernel(void* function, unsigned x, unsigned, unsigned, unsigned threads, unsigned, unsigned, unsigned shared,
                   void*, void** parameters, void**) {
  uint64_t values[kTableStart + kTableWords] = {};
  const Parameters own = parameters_of(function);
  for (size_t i = 0; i < own.count; ++i) memcpy(&values[i], parameters[i], sizeof values[i]);
  const bool has_table = own.table_words > 0;
  if (own.table_words <= kTableWords && has_table)
    memcpy(&values[kTableStart], parameters[own.count], own.table_words * sizeof(uint64_t));
  const size_t count = has_table ? kTableStart + own.table_words : own.count;
  const char* error = launch(function, x, threads, shared, values, count, 2);
  if (error) fprintf(stderr, "fake_driver: %s\n", error);
  return error ? 719 : 0;
}
int cuGetErrorName(int, const char** text) { *text = "CUDA_ERROR"; return 0; }
int cuGetErrorString(int, const char** text) { *text = "see the message of fake_driver"; return 0; }
}
