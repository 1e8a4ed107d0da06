// fake_driver.cpp -- TEST ONLY. As much of libcuda.so as evermoe calls, on top of emulator.cpp: device addresses are host
// addresses, and work that is put on a stream runs as late or as unluckily as streams.h says. Memory is garbage until
// it is written. Calls that CUDA leaves undefined fail with a message: memory of the host that is given back while a
// copy still needs it, copies past the end of an allocation.
#include "emulator.h"
#include "streams.h"
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <vector>

namespace {
enum Status { kSuccess = 0, kInvalidValue = 1, kInvalidImage = 200, kInvalidHandle = 400, kNotFound = 500, kNotReady = 600,
              kLaunchFailed = 719 };
constexpr unsigned kNonBlocking = 1;  // of the flags of a stream
constexpr size_t kCanaryBytes = 64;
constexpr unsigned char kGarbage = 0xa5, kCanary = 0x5a;
std::mutex mutex;
std::map<uintptr_t, size_t> device_memory, pinned_memory;  // start -> bytes
using Event = streams::Point;

int failed(int status, const char* what) {
  fprintf(stderr, "fake_driver: %s\n", what);
  return status;
}
int status() { return streams::error(); }
std::map<uintptr_t, size_t>::iterator holder(std::map<uintptr_t, size_t>& memory, uintptr_t place) {
  auto after = memory.upper_bound(place);
  if (after == memory.begin()) return memory.end();
  --after;
  return place < after->first + after->second ? after : memory.end();
}
bool is_pinned(const void* place) { return holder(pinned_memory, uintptr_t(place)) != pinned_memory.end(); }
// Whether an access begins in an allocation and ends past it.
bool runs_over(uintptr_t place, size_t bytes) {
  const auto found = holder(device_memory, place);
  return found != device_memory.end() && place + bytes > found->first + found->second;
}
int put(void* handle, std::function<int()> work, streams::HostRange host = {}) {
  streams::Stream* const stream = streams::of_handle(handle);
  if (!stream) return failed(kInvalidHandle, "no such stream");
  streams::ask(stream, std::move(work), host);
  return status();
}
int copy(uintptr_t to, uintptr_t from, size_t bytes, void* stream, streams::HostRange host = {}) {
  if (runs_over(to, bytes) || runs_over(from, bytes)) return failed(kInvalidValue, "a copy past the end of device memory");
  return put(stream, [=] { return memmove(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes), 0; }, host);
}
int finish(void* handle) {
  streams::Stream* const stream = streams::of_handle(handle);
  if (!stream) return failed(kInvalidHandle, "no such stream");
  streams::run_until(streams::end_of(stream));
  return status();
}
uintptr_t allocate(size_t bytes) {
  auto* const memory = static_cast<unsigned char*>(aligned_alloc(256, (bytes + kCanaryBytes + 255) / 256 * 256));
  std::fill_n(memory, bytes, kGarbage);
  std::fill_n(memory + bytes, kCanaryBytes, kCanary);
  device_memory[uintptr_t(memory)] = bytes;
  return uintptr_t(memory);
}
int release(uintptr_t place) {
  const auto found = device_memory.find(place);
  if (found == device_memory.end()) return failed(kInvalidValue, "no such device memory");
  auto* const memory = reinterpret_cast<unsigned char*>(place);
  const bool is_whole = std::all_of(memory + found->second, memory + found->second + kCanaryBytes, [](auto b) { return b == kCanary; });
  device_memory.erase(found);
  free(memory);
  return is_whole ? status() : failed(kLaunchFailed, "a write past the end of device memory");
}
int unpin(void* place) {
  const auto found = pinned_memory.find(uintptr_t(place));
  if (found == pinned_memory.end()) return failed(kInvalidValue, "no such pinned memory");
  if (streams::is_used({place, found->second})) return failed(kInvalidValue, "pinned memory that a copy still needs is given back");
  pinned_memory.erase(found);
  return status();
}
}  // namespace
#define LOCKED const std::lock_guard<std::mutex> hold(mutex)

extern "C" {
// For tests: a streams::Policy.
void fake_driver_policy(int policy) { LOCKED; streams::set_policy(policy); }

// ---- device and context: one of each ---------------------------------------------------------------
int cuInit(unsigned) { return kSuccess; }
int cuDeviceGet(int* device, int) { return *device = 0; }
int cuDeviceGetCount(int* count) { *count = 1; return kSuccess; }
int cuDeviceGetAttribute(int* value, int, int) { return *value = 0; }
int cuDevicePrimaryCtxRetain(void** context, int) { *context = reinterpret_cast<void*>(1); return kSuccess; }
int cuDevicePrimaryCtxRelease_v2(int) { return kSuccess; }
int cuCtxSetCurrent(void*) { return kSuccess; }
int cuCtxGetCurrent(void** context) { *context = reinterpret_cast<void*>(1); return kSuccess; }
int cuCtxSynchronize() { LOCKED; streams::run_all(); return status(); }
int cuCtxGetStreamPriorityRange(int* least, int* greatest) { *least = 0; *greatest = -5; return kSuccess; }
int cuGetErrorName(int, const char** text) { *text = "CUDA_ERROR"; return kSuccess; }
int cuGetErrorString(int, const char** text) { *text = "see the message of fake_driver"; return kSuccess; }

// ---- kernels -------------------------------------------------------------------------------------------
int cuModuleLoadData(void** module, const void* image) {
  uint32_t magic;
  memcpy(&magic, image, sizeof magic);
  if (magic != 0xba55ed50) return kInvalidImage;
  *module = reinterpret_cast<void*>(1);  // every module has every kernel
  return kSuccess;
}
int cuModuleUnload(void*) { return kSuccess; }
int cuModuleGetFunction(const void** function, void*, const char* name) {
  *function = emulator::find_kernel(name);
  return *function ? kSuccess : kNotFound;
}
int cuLaunchKernel(const emulator::Kernel* kernel, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                   unsigned threads_z, unsigned shared, void* stream, void** parameters, void**) {
  LOCKED;
  if (y != 1 || z != 1 || threads_y != 1 || threads_z != 1) return failed(kInvalidValue, "grids of one dimension alone");
  if (const char* limit = emulator::over_limits(*kernel, 0, x, threads, shared)) return failed(kInvalidValue, limit);
  std::vector<std::vector<unsigned char>> values;  // as they are now
  for (size_t i = 0; i < kernel->num_parameters; ++i) {
    const auto* const value = static_cast<unsigned char*>(parameters[i]);
    values.emplace_back(value, value + kernel->sizes[i]);
  }
  return put(stream, [=]() mutable {
    std::vector<void*> addresses;
    for (auto& value : values) addresses.push_back(value.data());
    const char* const error = emulator::launch(*kernel, 0, x, threads, shared, addresses.data(), 2);
    return error ? failed(kLaunchFailed, error) : kSuccess;
  });
}
int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  LOCKED;
  return put(stream, [=] { return function(data), kSuccess; });
}

// ---- memory --------------------------------------------------------------------------------------------
int cuMemAlloc_v2(uintptr_t* address, size_t bytes) {
  LOCKED;
  if (!bytes) return kInvalidValue;
  *address = allocate(bytes);
  return status();
}
int cuMemAllocAsync(uintptr_t* address, size_t bytes, void*) { return cuMemAlloc_v2(address, bytes); }
int cuMemFree_v2(uintptr_t address) { LOCKED; streams::run_all(); return release(address); }
int cuMemFreeAsync(uintptr_t address, void* stream) { LOCKED; return put(stream, [=] { return release(address); }); }
int cuMemHostAlloc(void** place, size_t bytes, unsigned) {
  LOCKED;
  if (!bytes) return kInvalidValue;
  *place = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  memset(*place, kGarbage, bytes);
  pinned_memory[uintptr_t(*place)] = bytes;
  return status();
}
int cuMemFreeHost(void* place) {
  LOCKED;
  const int error = unpin(place);
  if (!error) free(place);
  return error;
}
int cuMemHostRegister_v2(void* place, size_t bytes, unsigned) {
  LOCKED;
  if (!bytes || is_pinned(place)) return failed(kInvalidValue, "nothing to pin, or pinned already");
  pinned_memory[uintptr_t(place)] = bytes;
  return status();
}
int cuMemHostUnregister(void* place) { LOCKED; return unpin(place); }
int cuMemHostGetDevicePointer_v2(uintptr_t* address, void* place, unsigned) { *address = uintptr_t(place); return kSuccess; }
// Memory that is not pinned is read before the call returns, and written before it returns.
int cuMemcpyHtoDAsync_v2(uintptr_t to, const void* from, size_t bytes, void* stream) {
  LOCKED;
  if (is_pinned(from)) return copy(to, uintptr_t(from), bytes, stream, {from, bytes});
  if (runs_over(to, bytes)) return failed(kInvalidValue, "a copy past the end of device memory");
  const auto* const first = static_cast<const unsigned char*>(from);
  std::vector<unsigned char> staged(first, first + bytes);
  return put(stream, [=] { return memcpy(reinterpret_cast<void*>(to), staged.data(), bytes), 0; });
}
int cuMemcpyDtoHAsync_v2(void* to, uintptr_t from, size_t bytes, void* stream) {
  LOCKED;
  const int error = copy(uintptr_t(to), from, bytes, stream, {to, bytes});
  return error || is_pinned(to) ? error : finish(stream);
}
int cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t bytes, void* stream) { LOCKED; return copy(to, from, bytes, stream); }
int cuMemcpyHtoD_v2(uintptr_t to, const void* from, size_t bytes) {
  LOCKED;
  const int error = copy(to, uintptr_t(from), bytes, nullptr);
  return error ? error : finish(nullptr);
}
int cuMemcpyDtoH_v2(void* to, uintptr_t from, size_t bytes) {
  LOCKED;
  const int error = copy(uintptr_t(to), from, bytes, nullptr);
  return error ? error : finish(nullptr);
}
int cuMemsetD8Async(uintptr_t address, unsigned char byte, size_t count, void* stream) {
  LOCKED;
  if (runs_over(address, count)) return failed(kInvalidValue, "a memset past the end of device memory");
  return put(stream, [=] { return memset(reinterpret_cast<void*>(address), byte, count), 0; });
}

// ---- streams and events: a question for them lets one piece of work run, so that who asks again and again gets on ------
int cuStreamCreateWithPriority(void** stream, unsigned flags, int) {
  LOCKED;
  *stream = streams::create(!(flags & kNonBlocking));
  return status();
}
int cuStreamCreate(void** stream, unsigned flags) { return cuStreamCreateWithPriority(stream, flags, 0); }
int cuStreamDestroy_v2(void* handle) {
  LOCKED;
  streams::Stream* const stream = streams::of_handle(handle);
  if (!stream || uintptr_t(handle) <= 1) return failed(kInvalidHandle, "no such stream");
  streams::destroy(stream);
  return status();
}
int cuStreamSynchronize(void* stream) { LOCKED; return finish(stream); }
int cuStreamQuery(void* handle) {
  LOCKED;
  streams::Stream* const stream = streams::of_handle(handle);
  if (!stream) return failed(kInvalidHandle, "no such stream");
  if (streams::is_passed(streams::end_of(stream))) return status();
  streams::run_one(stream);
  return kNotReady;
}
int cuStreamWaitEvent(void* handle, const Event* event, unsigned) {
  LOCKED;
  streams::Stream* const stream = streams::of_handle(handle);
  if (!stream) return failed(kInvalidHandle, "no such stream");
  streams::ask_to_wait(stream, *event);
  return status();
}
int cuStreamIsCapturing(void*, int* answer) { return *answer = 0; }
int cuEventCreate(Event** event, unsigned) { *event = new Event; return kSuccess; }
int cuEventDestroy_v2(Event* event) { delete event; return kSuccess; }
int cuEventRecord(Event* event, void* handle) {
  LOCKED;
  streams::Stream* const stream = streams::of_handle(handle);
  if (!stream) return failed(kInvalidHandle, "no such stream");
  *event = streams::end_of(stream);
  return status();
}
int cuEventSynchronize(const Event* event) { LOCKED; streams::run_until(*event); return status(); }
int cuEventQuery(const Event* event) {
  LOCKED;
  if (streams::is_passed(*event)) return status();
  streams::run_one(event->stream);
  return kNotReady;
}
}
