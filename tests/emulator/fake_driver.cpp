// fake_driver.cpp -- TEST ONLY. As much of libcuda.so as evermoe calls, on top of emulator.cpp: device addresses are host
// addresses, and work that is put on a stream runs as late or as unluckily as streams.h says. Memory is garbage until
// it is written. Calls that CUDA leaves undefined fail with a message: memory of the host that is given back while a
// copy still needs it, copies past the end of an allocation. There are two devices; a thread has no context until it sets
// one, and streams, events and kernels are those of the context in which they were made. What goes wrong in a context's
// work is told by the next call that has something to do with it, and by every one after that.
#include "emulator.h"
#include "streams.h"
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {
enum Status { kSuccess = 0, kInvalidValue = 1, kInvalidImage = 200, kInvalidContext = 201, kInvalidHandle = 400, kNotFound = 500, kNotReady = 600,
              kLaunchOutOfResources = 701, kLaunchFailed = 719 };
constexpr unsigned kNonBlocking = 1;  // of the flags of a stream
constexpr unsigned kBlockingSync = 1;  // of the flags of an event
constexpr size_t kCanaryBytes = 64;
constexpr unsigned char kGarbage = 0xa5, kCanary = 0x5a;
std::mutex mutex;
int launches_to_refuse;
std::map<uintptr_t, size_t> device_memory, pinned_memory;  // start -> bytes
// An event, and whether a host thread that waits for it leaves the processor to others.
struct Event : streams::Point { bool blocks = false; };

// This thread's context: the number of its device, plus 1. Thread-local memory of the library is the kernels' shared memory.
void*& current() {
  static std::mutex hold;
  static std::map<std::thread::id, void*> contexts;
  const std::lock_guard<std::mutex> held(hold);
  return contexts[std::this_thread::get_id()];
}
std::map<const void*, void*> owners;   // contexts of streams and events
struct Function { const emulator::Kernel* kernel; void* context; };
std::map<std::pair<std::string, void*>, Function> functions;

int failed(int status, const char* what) {
  fprintf(stderr, "fake_driver: %s\n", what);
  return status;
}
int status() { return streams::error(current()); }
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
  streams::Stream* const stream = streams::of_handle(handle, current());
  if (!stream) return failed(kInvalidHandle, "no such stream");
  streams::ask(stream, std::move(work), host);
  return status();
}
int copy(uintptr_t to, uintptr_t from, size_t bytes, void* stream, streams::HostRange host = {}) {
  if (runs_over(to, bytes) || runs_over(from, bytes)) return failed(kInvalidValue, "a copy past the end of device memory");
  return put(stream, [=] { return memmove(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes), 0; }, host);
}
int finish(void* handle) {
  streams::Stream* const stream = streams::of_handle(handle, current());
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
#define IN_CONTEXT                                                                    \
  LOCKED;                                                                             \
  if (!current()) return failed(kInvalidContext, "this thread has no context"); \
  if (status()) return status()
// Whether a stream is of a context; each has a default stream.
static bool is_of(const void* stream, void* context) {
  return uintptr_t(stream) <= 1 || owners[stream] == context;
}

extern "C" {
// For tests: a streams::Policy.
void fake_driver_policy(int policy) { LOCKED; streams::set_policy(policy); }
// So many works from now one fails, and its context with it; 0 begins anew, as in a new process.
void fake_driver_fault(int works) {
  LOCKED;
  if (works == 0) {
    streams::heal();
    pinned_memory.clear();
  }
  streams::plant_fault(works);
}
// So many launches from now one is refused; what else was asked for goes on.
void fake_driver_refuse(int launches) { LOCKED; launches_to_refuse = launches; }
int fake_driver_is_idle() { LOCKED; return streams::is_idle(current()); }

// ---- two devices, each with one context ------------------------------------------------------------
int cuInit(unsigned) { return kSuccess; }
int cuDeviceGet(int* device, int number) {
  *device = number;
  return number == 0 || number == 1 ? kSuccess : kInvalidValue;
}
int cuDeviceGetCount(int* count) { *count = 2; return kSuccess; }
int cuDeviceGetAttribute(int* value, int, int) { return *value = 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = reinterpret_cast<void*>(device + 1); return kSuccess; }
int cuDevicePrimaryCtxRelease_v2(int) { return kSuccess; }
int cuCtxSetCurrent(void* context) { current() = context; return kSuccess; }
int cuCtxGetCurrent(void** context) { *context = current(); return kSuccess; }
int cuCtxSynchronize() { IN_CONTEXT; streams::run_all(current()); return status(); }
int cuCtxGetStreamPriorityRange(int* least, int* greatest) { *least = 0; *greatest = -5; return kSuccess; }
int cuGetErrorName(int error, const char** text) {
  *text = error == streams::kIllegalAddress ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR";
  return kSuccess;
}
int cuGetErrorString(int, const char** text) { *text = "see the message of fake_driver"; return kSuccess; }

// ---- kernels -------------------------------------------------------------------------------------------
int cuModuleLoadData(void** module, const void* image) {
  IN_CONTEXT;
  uint32_t magic;
  memcpy(&magic, image, sizeof magic);
  if (magic != 0xba55ed50) return kInvalidImage;
  *module = current();  // every module has every kernel
  return kSuccess;
}
int cuModuleUnload(void*) { return kSuccess; }
int cuModuleGetFunction(const void** function, void* module, const char* name) {
  IN_CONTEXT;
  const emulator::Kernel* const kernel = emulator::find_kernel(name);
  if (kernel) *function = &(functions[{name, module}] = {kernel, module});
  return kernel ? kSuccess : kNotFound;
}
int cuLaunchKernel(const Function* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                   unsigned threads_z, unsigned shared, void* stream, void** parameters, void**) {
  IN_CONTEXT;
  const emulator::Kernel* const kernel = function->kernel;
  if (function->context != current() || !is_of(stream, current())) return failed(kInvalidHandle, "a kernel or stream of another device");
  if (y != 1 || z != 1 || threads_y != 1 || threads_z != 1) return failed(kInvalidValue, "grids of one dimension alone");
  if (launches_to_refuse > 0 && --launches_to_refuse == 0) return failed(kLaunchOutOfResources, "a launch that is refused, as asked for");
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
  IN_CONTEXT;
  return put(stream, [=] { return function(data), kSuccess; });
}

// ---- memory --------------------------------------------------------------------------------------------
int cuMemAlloc_v2(uintptr_t* address, size_t bytes) {
  IN_CONTEXT;
  if (!bytes) return kInvalidValue;
  *address = allocate(bytes);
  return status();
}
int cuMemAllocAsync(uintptr_t* address, size_t bytes, void*) { return cuMemAlloc_v2(address, bytes); }
int cuMemFree_v2(uintptr_t address) { IN_CONTEXT; streams::run_all(current()); return release(address); }
int cuMemFreeAsync(uintptr_t address, void* stream) { IN_CONTEXT; return put(stream, [=] { return release(address); }); }
int cuMemHostAlloc(void** place, size_t bytes, unsigned) {
  IN_CONTEXT;
  if (!bytes) return kInvalidValue;
  *place = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  memset(*place, kGarbage, bytes);
  pinned_memory[uintptr_t(*place)] = bytes;
  return status();
}
int cuMemFreeHost(void* place) {
  IN_CONTEXT;
  const int error = unpin(place);
  if (!error) free(place);
  return error;
}
int cuMemHostRegister_v2(void* place, size_t bytes, unsigned) {
  IN_CONTEXT;
  if (!bytes || is_pinned(place)) return failed(kInvalidValue, "nothing to pin, or pinned already");
  pinned_memory[uintptr_t(place)] = bytes;
  return status();
}
int cuMemHostUnregister(void* place) { IN_CONTEXT; return unpin(place); }
int cuMemHostGetDevicePointer_v2(uintptr_t* address, void* place, unsigned) { *address = uintptr_t(place); return kSuccess; }
// Memory that is not pinned is read before the call returns, and written before it returns.
int cuMemcpyHtoDAsync_v2(uintptr_t to, const void* from, size_t bytes, void* stream) {
  IN_CONTEXT;
  if (is_pinned(from)) return copy(to, uintptr_t(from), bytes, stream, {from, bytes});
  if (runs_over(to, bytes)) return failed(kInvalidValue, "a copy past the end of device memory");
  const auto* const first = static_cast<const unsigned char*>(from);
  std::vector<unsigned char> staged(first, first + bytes);
  return put(stream, [=] { return memcpy(reinterpret_cast<void*>(to), staged.data(), bytes), 0; });
}
int cuMemcpyDtoHAsync_v2(void* to, uintptr_t from, size_t bytes, void* stream) {
  IN_CONTEXT;
  const int error = copy(uintptr_t(to), from, bytes, stream, {to, bytes});
  return error || is_pinned(to) ? error : finish(stream);
}
int cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t bytes, void* stream) { IN_CONTEXT; return copy(to, from, bytes, stream); }
int cuMemcpyHtoD_v2(uintptr_t to, const void* from, size_t bytes) {
  IN_CONTEXT;
  const int error = copy(to, uintptr_t(from), bytes, nullptr);
  return error ? error : finish(nullptr);
}
int cuMemcpyDtoH_v2(void* to, uintptr_t from, size_t bytes) {
  IN_CONTEXT;
  const int error = copy(uintptr_t(to), from, bytes, nullptr);
  return error ? error : finish(nullptr);
}
int cuMemsetD8Async(uintptr_t address, unsigned char byte, size_t count, void* stream) {
  IN_CONTEXT;
  if (runs_over(address, count)) return failed(kInvalidValue, "a memset past the end of device memory");
  return put(stream, [=] { return memset(reinterpret_cast<void*>(address), byte, count), 0; });
}

// ---- streams and events: a question for them lets one piece of work run, so that who asks again and again gets on ------
int cuStreamCreateWithPriority(void** stream, unsigned flags, int) {
  IN_CONTEXT;
  *stream = streams::create(current(), !(flags & kNonBlocking));
  owners[*stream] = current();
  return status();
}
int cuStreamCreate(void** stream, unsigned flags) { return cuStreamCreateWithPriority(stream, flags, 0); }
int cuStreamDestroy_v2(void* handle) {
  IN_CONTEXT;
  streams::Stream* const stream = streams::of_handle(handle, current());
  if (!stream || uintptr_t(handle) <= 1) return failed(kInvalidHandle, "no such stream");
  owners.erase(handle);
  streams::destroy(stream);
  return status();
}
int cuStreamSynchronize(void* stream) { IN_CONTEXT; return finish(stream); }
int cuStreamQuery(void* handle) {
  IN_CONTEXT;
  streams::Stream* const stream = streams::of_handle(handle, current());
  if (!stream) return failed(kInvalidHandle, "no such stream");
  if (streams::is_passed(streams::end_of(stream))) return status();
  streams::run_one(stream);
  return kNotReady;
}
int cuStreamWaitEvent(void* handle, const Event* event, unsigned) {
  IN_CONTEXT;
  streams::Stream* const stream = streams::of_handle(handle, current());
  if (!stream) return failed(kInvalidHandle, "no such stream");
  streams::ask_to_wait(stream, *event);
  return status();
}
int cuStreamIsCapturing(void*, int* answer) { return *answer = 0; }
int cuThreadExchangeStreamCaptureMode(int*) { return kSuccess; }
int cuEventCreate(Event** event, unsigned flags) {
  IN_CONTEXT;
  *event = new Event;
  (*event)->blocks = flags & kBlockingSync;
  owners[*event] = current();
  return kSuccess;
}
int cuEventDestroy_v2(Event* event) {
  LOCKED;
  const int error = streams::error(owners[event]);
  owners.erase(event);
  delete event;
  return error;
}
int cuEventRecord(Event* event, void* handle) {
  IN_CONTEXT;
  if ((uintptr_t(handle) <= 1 ? current() : owners[handle]) != owners[event])
    return failed(kInvalidHandle, "an event and a stream of two devices");
  streams::Stream* const stream = streams::of_handle(handle, current());
  if (!stream) return failed(kInvalidHandle, "no such stream");
  static_cast<streams::Point&>(*event) = streams::end_of(stream);
  return status();
}
int cuEventSynchronize(const Event* event) {
  IN_CONTEXT;
  if (!event->blocks) return failed(kInvalidHandle, "a wait for this event would keep a processor busy");
  streams::run_until(*event);
  return status();
}
int cuEventQuery(const Event* event) {
  IN_CONTEXT;
  if (streams::is_passed(*event)) return status();
  streams::run_one(event->stream);
  return kNotReady;
}
}
