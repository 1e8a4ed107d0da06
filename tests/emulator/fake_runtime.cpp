// fake_runtime.cpp -- TEST ONLY. As much of libcudart.so as torch calls for memory, copies, streams and events, on top of
// fake_driver.cpp. Preloaded before a torch that was built with CUDA, it gives torch's own tensors, allocators, streams and
// events on the stand-in's devices. Torch's kernels are machine code of a GPU: a launch of one fails with a message.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

extern "C" {
int cuCtxGetCurrent(void** context);
int cuCtxSetCurrent(void* context);
int cuCtxSynchronize();
int cuDevicePrimaryCtxRetain(void** context, int device);
int cuDeviceGetCount(int* count);
int cuEventCreate(void** event, unsigned flags);
int cuEventDestroy_v2(void* event);
int cuEventElapsedTime(float* milliseconds, const void* from, const void* to);
int cuEventQuery(const void* event);
int cuEventRecord(void* event, void* stream);
int cuEventSynchronize(const void* event);
int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data);
int cuMemAlloc_v2(uintptr_t* address, size_t bytes);
int cuMemFree_v2(uintptr_t address);
int cuMemFreeHost(void* place);
int cuMemHostAlloc(void** place, size_t bytes, unsigned flags);
int cuMemHostRegister_v2(void* place, size_t bytes, unsigned flags);
int cuMemHostUnregister(void* place);
int cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t bytes, void* stream);
int cuMemcpyDtoHAsync_v2(void* to, uintptr_t from, size_t bytes, void* stream);
int cuMemcpyHtoDAsync_v2(uintptr_t to, const void* from, size_t bytes, void* stream);
int cuMemsetD8Async(uintptr_t address, unsigned char byte, size_t count, void* stream);
int cuStreamCreateWithPriority(void** stream, unsigned flags, int priority);
int cuStreamDestroy_v2(void* stream);
int cuStreamIsCapturing(void* stream, int* answer);
int cuStreamQuery(void* stream);
int cuStreamSynchronize(void* stream);
int cuStreamWaitEvent(void* stream, const void* event, unsigned flags);
int cuThreadExchangeStreamCaptureMode(int* mode);
int fake_driver_memory(const void* place);
}

namespace {
constexpr int kSuccess = 0, kInvalidValue = 1, kNoKernel = 98, kNotReady = 600, kNotSupported = 801;
constexpr unsigned kBlockingSync = 1;  // of the flags of an event
enum Kind { kHostToHost, kHostToDevice, kDeviceToHost, kDeviceToDevice, kDefault };
enum Memory { kUnregistered, kHost, kDevice };

// This thread's. Thread-local memory of the library is the kernels' shared memory.
int& last_error() {
  static std::mutex hold;
  static std::map<std::thread::id, int> errors;
  const std::lock_guard<std::mutex> held(hold);
  return errors[std::this_thread::get_id()];
}

int told(int status) {
  if (status != kSuccess && status != kNotReady) last_error() = status;
  return status;
}
// A thread that has not chosen a device uses the first one.
void begin() {
  void* context = nullptr;
  cuCtxGetCurrent(&context);
  if (context) return;
  cuDevicePrimaryCtxRetain(&context, 0);
  cuCtxSetCurrent(context);
}
int no_kernel() {
  fprintf(stderr, "fake_runtime: a kernel of torch's own cannot run here\n");
  return told(kNoKernel);
}
int unsupported() { return kNotSupported; }
int copy(void* to, const void* from, size_t bytes, int kind, void* stream) {
  if (kind == kDefault) kind = (fake_driver_memory(from) == kDevice) * 2 + (fake_driver_memory(to) == kDevice);
  if (kind == kHostToDevice) return cuMemcpyHtoDAsync_v2(uintptr_t(to), from, bytes, stream);
  if (kind == kDeviceToHost) return cuMemcpyDtoHAsync_v2(to, uintptr_t(from), bytes, stream);
  if (kind == kDeviceToDevice) return cuMemcpyDtoDAsync_v2(uintptr_t(to), uintptr_t(from), bytes, stream);
  return kInvalidValue;
}
}  // namespace
#define CALL(expression) \
  begin();               \
  return told(expression)

extern "C" {
// ---- devices -------------------------------------------------------------------------------------------
int cudaDriverGetVersion(int* version) { *version = 13000; return kSuccess; }
int cudaRuntimeGetVersion(int* version) { *version = 13000; return kSuccess; }
int cudaGetDeviceCount(int* count) { return cuDeviceGetCount(count); }
int cudaGetDevice(int* device) {
  void* context = nullptr;
  cuCtxGetCurrent(&context);
  *device = context ? int(uintptr_t(context)) - 1 : 0;
  return kSuccess;
}
int cudaSetDevice(int device) {
  void* context = nullptr;
  int count = 0;
  cuDeviceGetCount(&count);
  if (device < 0 || device >= count) return told(101);
  cuDevicePrimaryCtxRetain(&context, device);
  return cuCtxSetCurrent(context);
}
int cudaDeviceSynchronize() { CALL(cuCtxSynchronize()); }
int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0; *greatest = -5; return kSuccess; }
int cudaDeviceGetAttribute(int* value, int, int) { *value = 0; return kSuccess; }
int cudaDeviceCanAccessPeer(int* answer, int, int) { *answer = 1; return kSuccess; }
int cudaDeviceEnablePeerAccess(int, unsigned) { return kSuccess; }
// Of cudaDeviceProp of CUDA 12 and 13 what torch reads, by its place.
int cudaGetDeviceProperties(unsigned char* properties, int) {
  const auto put = [=](size_t at, int value) { memcpy(properties + at, &value, sizeof value); };
  const size_t memory = size_t(1) << 34;
  memset(properties, 0, 640);
  strcpy(reinterpret_cast<char*>(properties), "stand-in");
  if (const char* const own = getenv("CUDA_VISIBLE_DEVICES")) put(256, atoi(own) + 1);  // the UUID
  memcpy(properties + 288, &memory, sizeof memory);
  put(308, 32);    // warpSize
  put(320, 1024);  // maxThreadsPerBlock
  put(360, 9);     // major
  put(384, 1);     // multiProcessorCount
  return kSuccess;
}
int cudaGetDeviceProperties_v2(unsigned char* properties, int device) { return cudaGetDeviceProperties(properties, device); }
int cudaDeviceGetPCIBusId(char* id, int size, int) { snprintf(id, size_t(size), "0000:00:00.0"); return kSuccess; }
int cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long, int* status) {
  static void* const self = dlopen("libcuda.so", RTLD_NOW | RTLD_NOLOAD);
  *function = self ? dlsym(self, name) : nullptr;
  if (!*function) *function = reinterpret_cast<void*>(unsupported);
  if (status) *status = 0;
  return kSuccess;
}
int cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags, int* status) {
  return cudaGetDriverEntryPointByVersion(name, function, 0, flags, status);
}
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) { *flags = 0; *active = 1; return kSuccess; }

// ---- errors --------------------------------------------------------------------------------------------
int cudaGetLastError() { return std::exchange(last_error(), 0); }
int cudaPeekAtLastError() { return last_error(); }
const char* cudaGetErrorName(int) { return "an error of the stand-in"; }
const char* cudaGetErrorString(int) { return "see the message of fake_runtime or fake_driver"; }

// ---- torch's own kernels ---------------------------------------------------------------------------------
int __cudaGetKernel(void** kernel, const void*) { *kernel = nullptr; return kSuccess; }
struct Dim3 { unsigned x, y, z; };
int __cudaLaunchKernel(void*, Dim3, Dim3, void**, size_t, void*) { return no_kernel(); }
int cudaLaunchKernel(const void*, Dim3, Dim3, void**, size_t, void*) { return no_kernel(); }
int cudaLaunchKernelExC(const void*, const void*, void**) { return no_kernel(); }

// ---- memory --------------------------------------------------------------------------------------------
int cudaMalloc(uintptr_t* address, size_t bytes) { CALL(cuMemAlloc_v2(address, bytes)); }
int cudaFree(uintptr_t address) { CALL(address ? cuMemFree_v2(address) : kSuccess); }
int cudaHostAlloc(void** place, size_t bytes, unsigned flags) { CALL(cuMemHostAlloc(place, bytes, flags)); }
int cudaFreeHost(void* place) { CALL(cuMemFreeHost(place)); }
int cudaHostRegister(void* place, size_t bytes, unsigned flags) { CALL(cuMemHostRegister_v2(place, bytes, flags)); }
int cudaHostUnregister(void* place) { CALL(cuMemHostUnregister(place)); }
int cudaMemGetInfo(size_t* free, size_t* all) { *free = *all = size_t(1) << 34; return kSuccess; }
struct Attributes { int type, device; void *on_device, *on_host; };
int cudaPointerGetAttributes(Attributes* found, const void* place) {
  const int type = fake_driver_memory(place);
  void* const address = const_cast<void*>(place);
  *found = {type, 0, type == kUnregistered ? nullptr : address, type == kHost ? address : nullptr};
  return kSuccess;
}
int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream) {
  CALL(bytes ? copy(to, from, bytes, kind, stream) : kSuccess);
}
int cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, void* stream) {
  CALL(bytes ? copy(to, from, bytes, kDeviceToDevice, stream) : kSuccess);
}
int cudaMemcpy(void* to, const void* from, size_t bytes, int kind) {
  const int error = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return error ? error : told(cuStreamSynchronize(nullptr));
}
int cudaMemsetAsync(uintptr_t address, int byte, size_t count, void* stream) {
  CALL(count ? cuMemsetD8Async(address, static_cast<unsigned char>(byte), count, stream) : kSuccess);
}

// ---- streams and events ----------------------------------------------------------------------------------
int cudaStreamCreateWithPriority(void** stream, unsigned flags, int priority) { CALL(cuStreamCreateWithPriority(stream, flags, priority)); }
int cudaStreamCreate(void** stream) { CALL(cuStreamCreateWithPriority(stream, 0, 0)); }
int cudaStreamDestroy(void* stream) { CALL(cuStreamDestroy_v2(stream)); }
int cudaStreamGetPriority(void*, int* priority) { *priority = 0; return kSuccess; }
int cudaStreamSynchronize(void* stream) { CALL(cuStreamSynchronize(stream)); }
int cudaStreamQuery(void* stream) { CALL(cuStreamQuery(stream)); }
int cudaStreamWaitEvent(void* stream, const void* event, unsigned flags) { CALL(cuStreamWaitEvent(stream, event, flags)); }
int cudaStreamIsCapturing(void* stream, int* answer) { CALL(cuStreamIsCapturing(stream, answer)); }
int cudaStreamGetCaptureInfo(void* stream, int* answer, unsigned long long* id) {
  if (id) *id = 0;
  CALL(cuStreamIsCapturing(stream, answer));
}
int cudaStreamGetCaptureInfo_v2(void* stream, int* answer, unsigned long long* id) { return cudaStreamGetCaptureInfo(stream, answer, id); }
int cudaThreadExchangeStreamCaptureMode(int* mode) { return cuThreadExchangeStreamCaptureMode(mode); }
int cudaLaunchHostFunc(void* stream, void (*function)(void*), void* data) { CALL(cuLaunchHostFunc(stream, function, data)); }
// Torch's events may keep a processor busy while the host waits: how it waits is torch's business.
int cudaEventCreateWithFlags(void** event, unsigned flags) { CALL(cuEventCreate(event, flags | kBlockingSync)); }
int cudaEventCreate(void** event) { return cudaEventCreateWithFlags(event, 0); }
int cudaEventDestroy(void* event) { CALL(cuEventDestroy_v2(event)); }
int cudaEventRecord(void* event, void* stream) { CALL(cuEventRecord(event, stream)); }
int cudaEventRecordWithFlags(void* event, void* stream, unsigned) { CALL(cuEventRecord(event, stream)); }
int cudaEventQuery(const void* event) { CALL(cuEventQuery(event)); }
int cudaEventSynchronize(const void* event) { CALL(cuEventSynchronize(event)); }
int cudaEventElapsedTime(float* milliseconds, const void* from, const void* to) { CALL(cuEventElapsedTime(milliseconds, from, to)); }
}
