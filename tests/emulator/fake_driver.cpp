// fake_driver.cpp -- TEST ONLY. As much of libcuda.so as evermoe calls, on top of emulator.cpp: device addresses are host
// addresses, and work that is put on a stream runs as late or as unluckily as streams.h says. Memory is garbage until
// it is written. Calls that CUDA leaves undefined fail with a message: memory of the host that is given back while a
// copy still needs it, copies past the end of an allocation. There are two devices; a thread has no context until it sets
// one, and streams, events and kernels are those of the context in which they were made. What goes wrong in a context's
// work is told by the next call that has something to do with it, and by every one after that. Calls that may wait for all
// of a context's streams do, but under kLate, as CUDA does not promise it. A stream takes 1024 works: a launch of one more
// holds up the host, and with it all other calls of the process, until the first has run.
#include "emulator.h"
#include "fake_driver.h"
#include "streams.h"
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {
enum Status { kSuccess = 0, kInvalidValue = 1, kInvalidImage = 200, kInvalidContext = 201, kInvalidHandle = 400, kNotFound = 500, kNotReady = 600,
              kCaptureUnsupported = 900, kCaptureInvalidated = 901, kNotCapturing = 902, kCaptureIsolation = 905, kCaptureImplicit = 906,
              kCapturedEvent = 907, kCaptureWrongThread = 908, kLaunchOutOfResources = 701, kLaunchFailed = 719 };
constexpr unsigned kNonBlocking = 1;  // of the flags of a stream
constexpr unsigned kBlockingSync = 1, kDisableTiming = 2;  // of the flags of an event
constexpr size_t kCanaryBytes = 64, kQueueLength = 1024;
constexpr unsigned char kGarbage = 0xa5, kCanary = 0x5a;
std::mutex mutex;
bool is_full;  // a thread waits until a stream takes its work
int launches_to_refuse, waits_for_all, functions_loaded;
std::map<uintptr_t, size_t> device_memory, pinned_memory;  // start -> bytes
std::map<uintptr_t, unsigned> flags_of_pinned;
// An event, and whether a host thread that waits for it leaves the processor to others.
struct Event : streams::Point {
  bool blocks = false, is_timed = true, is_captured = false;
  int64_t recorded_at = 0;
};
// When an event was reached, in nanoseconds of the host's clock: it is recorded before or after its stream came there.
int64_t reached_at(const Event& event) { return std::max(event.recorded_at, streams::passed_at(event)); }

// This thread's context: the number of its device, plus 1. Thread-local memory of the library is the kernels' shared memory.
void*& current() {
  static std::mutex hold;
  static std::map<std::thread::id, void*> contexts;
  const std::lock_guard<std::mutex> held(hold);
  return contexts[std::this_thread::get_id()];
}
std::map<const void*, void*> owners;   // contexts of streams and events
struct Function { const emulator::Kernel* kernel; void* context; };
struct Module { void* context; };
std::map<std::pair<std::string, const Module*>, Function> functions;

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
// A call that allocates, page-locks or loads code: it holds up the host until the context is idle.
void wait_for_all(bool surely) {
  if (!streams::is_idle(current())) ++waits_for_all;
  if (surely || streams::policy() != streams::kLate) streams::run_all(current());
}
void pause_driver();
// Runs what collectives wait for, whether or not a thread of the host waits: other processes need it.
void run_collective(streams::Point point) {
  static auto& awaited = *new std::vector<streams::Point>;
  static bool ended = false, begun = false;
  awaited.push_back(point);
  if (std::exchange(begun, true)) return;
  streams::set_pause(pause_driver);
  std::thread([] {
    for (;; std::this_thread::sleep_for(std::chrono::microseconds(200))) {
      const std::lock_guard<std::mutex> hold(mutex);
      if (ended) return;
      awaited.erase(std::remove_if(awaited.begin(), awaited.end(), streams::try_until), awaited.end());
    }
  }).detach();
  atexit([] { const std::lock_guard<std::mutex> hold(mutex); ended = true; });
}
// What a stream is asked for between cuStreamBeginCapture and cuStreamEndCapture.
struct Graph { std::vector<Making> works; };
enum CaptureMode { kGlobal, kOfThread, kRelaxed };
struct Capture {
  int mode;
  std::thread::id thread;
  void* context;
  Graph* graph;
  bool is_broken;
};
std::map<const void*, Capture> captures;  // by stream
std::map<std::thread::id, int> capture_modes;

Capture* capture_of(const void* stream) {
  const auto found = captures.find(stream);
  return found == captures.end() ? nullptr : &found->second;
}
int spoil(Capture& capture, const char* what) {
  capture.is_broken = true;
  return failed(kCaptureUnsupported, what);
}
// What a capture does not see and CUDA calls unsafe: spoils captures that do not allow it.
int unsafe_call(const char* what) {
  const auto me = std::this_thread::get_id();
  const int mode = capture_modes[me];
  int error = 0;
  for (auto& [stream, capture] : captures) {
    const bool mine = capture.thread == me && capture.mode != kRelaxed, others = capture.mode == kGlobal && mode == kGlobal;
    if (mode != kRelaxed && (mine || others)) error = spoil(capture, what);
  }
  return error;
}
#define UNSAFE \
  if (const int unsafe = unsafe_call(__func__)) return unsafe
// A wait for a stream, or a question for it: never for one that is captured.
int wait_or_ask(const void* stream, const char* what) {
  if (Capture* const capture = capture_of(stream)) return spoil(*capture, what);
  return unsafe_call(what);
}
// Work on the default stream, which streams that are captured would have to wait for.
int default_stream_call(const void* handle) {
  for (auto& [stream, capture] : captures)
    if (uintptr_t(handle) <= 1 && capture.context == current() && streams::waits_for_default(stream)) {
      capture.is_broken = true;
      return failed(kCaptureImplicit, "work on the default stream while one that waits for it is captured");
    }
  return 0;
}
// Lets other threads put works and run them.
void pause_driver() {
  mutex.unlock();
  std::this_thread::sleep_for(std::chrono::microseconds(50));
  mutex.lock();
}
void wait_for_room(streams::Stream* stream) {
  is_full = true;
  for (; streams::length(stream) >= kQueueLength; pause_driver()) streams::run_one(stream);
  is_full = false;
}
int put(void* handle, const Making& make, streams::HostRange host = {}) {
  streams::Stream* const stream = streams::of_handle(handle, current());
  if (!stream) return failed(kInvalidHandle, "no such stream");
  if (const int error = default_stream_call(handle)) return error;
  if (Capture* const capture = capture_of(handle)) {
    if (capture->is_broken) return kCaptureInvalidated;
    capture->graph->works.push_back(make);
    return kSuccess;
  }
  wait_for_room(stream);
  Collective made = make();
  const bool waits = bool(made.ready);
  streams::ask(stream, std::move(made.work), host, std::move(made.ready));
  if (waits) run_collective(streams::end_of(stream));
  return status();
}
int put(void* handle, std::function<int()> work, streams::HostRange host = {}) {
  return put(handle, Making([work = std::move(work)] { return Collective{{}, work}; }), host);
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
  wait_for_all(false);
  return status();
}
}  // namespace
// A call of the driver: not while another thread's waits for room in a stream.
struct Hold {
  Hold() {
    for (mutex.lock(); is_full;) pause_driver();
  }
  ~Hold() { mutex.unlock(); }
};
#define LOCKED const Hold hold
#define IN_CONTEXT                                                                    \
  LOCKED;                                                                             \
  if (!current()) return failed(kInvalidContext, "this thread has no context"); \
  if (status()) return status()
// Work that waits for other processes.
int fake_driver_wait_on_stream(void* stream, const Making& make) {
  IN_CONTEXT;
  return put(stream, make);
}
static int launches;          // of kernels
static std::string launched;  // names of kernels, and "memset", since a test asked
// Whether a stream is of a context; each has a default stream.
static bool is_of(const void* stream, void* context) {
  return uintptr_t(stream) <= 1 || owners[stream] == context;
}

extern "C" {
// For tests: a streams::Policy.
void fake_driver_policy(int policy) { LOCKED; streams::set_policy(policy); }
int fake_driver_launches() { LOCKED; return launches; }
// What was launched since the last call, each name with a space behind it; valid until the next call.
const char* fake_driver_launched() {
  LOCKED;
  static std::string told;
  told = std::exchange(launched, {});
  return told.c_str();
}
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
// Waits for all streams of a context that had work, and functions that were loaded, so far.
int fake_driver_waits_for_all() { LOCKED; return waits_for_all; }
int fake_driver_functions_loaded() { LOCKED; return functions_loaded; }
// As cudaMemoryType: 1 page-locked, 2 a device's, 0 any other.
int fake_driver_memory(const void* place) {
  LOCKED;
  if (is_pinned(place)) return 1;
  return holder(device_memory, uintptr_t(place)) == device_memory.end() ? 0 : 2;
}
int fake_driver_is_idle() { LOCKED; return streams::is_idle(current()); }

// ---- two devices, each with one context ------------------------------------------------------------
int cuInit(unsigned) { return kSuccess; }
int cuDeviceGet(int* device, int number) {
  *device = number;
  return number == 0 || number == 1 ? kSuccess : kInvalidValue;
}
int cuDeviceGetCount(int* count) { *count = 2; return kSuccess; }
int cuDeviceGetPCIBusId(char* text, int size, int device) {
  std::snprintf(text, size, "FFFF:%02X:00.0", device);
  return kSuccess;
}
int cuDeviceGetAttribute(int* value, int, int) { return *value = 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = reinterpret_cast<void*>(device + 1); return kSuccess; }
int cuDevicePrimaryCtxRelease_v2(int) { return kSuccess; }
int cuCtxSetCurrent(void* context) { LOCKED; current() = context; return kSuccess; }
int cuCtxGetCurrent(void** context) { *context = current(); return kSuccess; }
int cuCtxSynchronize() {
  IN_CONTEXT;
  for (auto& [stream, capture] : captures)
    if (capture.context == current()) return spoil(capture, "a wait for a context of which a stream is captured");
  UNSAFE;
  streams::run_all(current());
  return status();
}
int cuCtxGetStreamPriorityRange(int* least, int* greatest) { *least = 0; *greatest = -5; return kSuccess; }
int cuGetErrorName(int error, const char** text) {
  *text = error == streams::kIllegalAddress ? "CUDA_ERROR_ILLEGAL_ADDRESS"
        : error == kCaptureUnsupported      ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
                                            : "CUDA_ERROR";
  return kSuccess;
}
int cuGetErrorString(int, const char** text) { *text = "see the message of fake_driver"; return kSuccess; }

// ---- kernels -------------------------------------------------------------------------------------------
int cuModuleLoadData(Module** module, const void* image) {
  IN_CONTEXT;
  uint32_t magic;
  memcpy(&magic, image, sizeof magic);
  if (magic != 0xba55ed50) return kInvalidImage;
  UNSAFE;
  wait_for_all(false);
  *module = new Module{current()};  // every module has every kernel
  return kSuccess;
}
int cuModuleUnload(Module*) { return kSuccess; }
int cuModuleGetFunction(const void** function, const Module* module, const char* name) {
  IN_CONTEXT;
  const emulator::Kernel* const kernel = emulator::find_kernel(name);
  if (!kernel) return kNotFound;
  const auto [place, is_new] = functions.insert({{name, module}, {kernel, module->context}});
  *function = &place->second;
  if (!is_new) return status();
  UNSAFE;
  ++functions_loaded;  // CUDA_MODULE_LOADING=LAZY: its code comes to the device now
  wait_for_all(true);
  return status();
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
  ++launches;
  launched += kernel->name + std::string(" ");
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
  UNSAFE;
  if (!bytes) return kInvalidValue;
  wait_for_all(false);
  *address = allocate(bytes);
  return status();
}
int cuMemAllocAsync(uintptr_t* address, size_t bytes, void*) {
  IN_CONTEXT;
  UNSAFE;
  if (!bytes) return kInvalidValue;
  *address = allocate(bytes);
  return status();
}
int cuMemFree_v2(uintptr_t address) { IN_CONTEXT; UNSAFE; wait_for_all(true); return release(address); }
int cuMemFreeAsync(uintptr_t address, void* stream) { IN_CONTEXT; return put(stream, [=] { return release(address); }); }
int cuMemHostAlloc(void** place, size_t bytes, unsigned flags) {
  IN_CONTEXT;
  UNSAFE;
  if (!bytes) return kInvalidValue;
  wait_for_all(false);
  *place = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  memset(*place, kGarbage, bytes);
  pinned_memory[uintptr_t(*place)] = bytes;
  flags_of_pinned[uintptr_t(*place)] = flags;
  return status();
}
int cuMemHostGetFlags(unsigned* flags, const void* place) {
  LOCKED;
  if (!is_pinned(place)) return kInvalidValue;
  *flags = flags_of_pinned[holder(pinned_memory, uintptr_t(place))->first];
  return kSuccess;
}
int cuMemFreeHost(void* place) {
  IN_CONTEXT;
  UNSAFE;
  const int error = unpin(place);
  if (!error) free(place);
  return error;
}
int cuMemHostRegister_v2(void* place, size_t bytes, unsigned) {
  IN_CONTEXT;
  UNSAFE;
  if (!bytes || is_pinned(place)) return failed(kInvalidValue, "nothing to pin, or pinned already");
  wait_for_all(false);
  pinned_memory[uintptr_t(place)] = bytes;
  return status();
}
int cuMemHostUnregister(void* place) { IN_CONTEXT; UNSAFE; return unpin(place); }
int cuMemHostGetDevicePointer_v2(uintptr_t* address, void* place, unsigned) { *address = uintptr_t(place); return kSuccess; }
// Memory that is not pinned is read before the call returns, and written before it returns.
int cuMemcpyHtoDAsync_v2(uintptr_t to, const void* from, size_t bytes, void* stream) {
  IN_CONTEXT;
  if (is_pinned(from)) return copy(to, uintptr_t(from), bytes, stream, {from, bytes});
  if (const int error = wait_or_ask(stream, "a copy of memory that is not page-locked")) return error;
  if (runs_over(to, bytes)) return failed(kInvalidValue, "a copy past the end of device memory");
  const auto* const first = static_cast<const unsigned char*>(from);
  std::vector<unsigned char> staged(first, first + bytes);
  return put(stream, [=] { return memcpy(reinterpret_cast<void*>(to), staged.data(), bytes), 0; });
}
// With EVERMOE_TEST_HOST_BYTES_PER_SECOND a copy to the host takes as long as that says.
int cuMemcpyDtoHAsync_v2(void* to, uintptr_t from, size_t bytes, void* stream) {
  IN_CONTEXT;
  if (const char* const speed = getenv("EVERMOE_TEST_HOST_BYTES_PER_SECOND")) {
    const std::chrono::duration<double> lasts(bytes / atof(speed));
    if (const int error = put(stream, [=] { return std::this_thread::sleep_for(lasts), 0; })) return error;
  }
  if (!is_pinned(to))
    if (const int error = wait_or_ask(stream, "a copy to memory that is not page-locked")) return error;
  const int error = copy(uintptr_t(to), from, bytes, stream, {to, bytes});
  return error || is_pinned(to) ? error : finish(stream);
}
int cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t bytes, void* stream) { IN_CONTEXT; return copy(to, from, bytes, stream); }
int cuMemcpyHtoD_v2(uintptr_t to, const void* from, size_t bytes) {
  IN_CONTEXT;
  UNSAFE;
  const int error = copy(to, uintptr_t(from), bytes, nullptr);
  return error ? error : finish(nullptr);
}
int cuMemcpyDtoH_v2(void* to, uintptr_t from, size_t bytes) {
  IN_CONTEXT;
  UNSAFE;
  const int error = copy(uintptr_t(to), from, bytes, nullptr);
  return error ? error : finish(nullptr);
}
int cuMemsetD8Async(uintptr_t address, unsigned char byte, size_t count, void* stream) {
  IN_CONTEXT;
  if (runs_over(address, count)) return failed(kInvalidValue, "a memset past the end of device memory");
  launched += "memset ";
  return put(stream, [=] { return memset(reinterpret_cast<void*>(address), byte, count), 0; });
}

// ---- streams: a question for them, or for events, lets one piece of work run, so that who asks again and again gets on ------
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
int cuStreamSynchronize(void* stream) {
  IN_CONTEXT;
  const int error = wait_or_ask(stream, __func__);
  return error ? error : finish(stream);
}
int cuStreamQuery(void* handle) {
  IN_CONTEXT;
  streams::Stream* const stream = streams::of_handle(handle, current());
  if (!stream) return failed(kInvalidHandle, "no such stream");
  if (const int error = wait_or_ask(handle, __func__)) return error;
  if (streams::is_passed(streams::end_of(stream))) return status();
  streams::run_one(stream);
  return kNotReady;
}
int cuStreamWaitEvent(void* handle, const Event* event, unsigned) {
  IN_CONTEXT;
  streams::Stream* const stream = streams::of_handle(handle, current());
  if (!stream) return failed(kInvalidHandle, "no such stream");
  Capture* const capture = capture_of(handle);
  if (event->is_captured && !capture) return failed(kCaptureIsolation, "streams that join a capture are not in this stand-in");
  if (capture && !event->is_captured) {
    capture->is_broken = true;
    return failed(kCaptureIsolation, "a captured stream waits for what is not captured");
  }
  if (!capture) streams::ask_to_wait(stream, *event);
  return status();
}

// A word of page-locked memory gets a value when the stream comes to it.
int cuStreamWriteValue32_v2(void* stream, uintptr_t address, unsigned value, unsigned) {
  IN_CONTEXT;
  auto* const word = reinterpret_cast<unsigned*>(address);
  if (!is_pinned(word)) return failed(kInvalidValue, "a write to host memory that is not page-locked");
  return put(stream, [=] { return __atomic_store_n(word, value, __ATOMIC_RELEASE), 0; }, {word, sizeof value});
}

// ---- captures into graphs ------------------------------------------------------------------------------
int cuThreadExchangeStreamCaptureMode(int* mode) {
  LOCKED;
  std::swap(*mode, capture_modes[std::this_thread::get_id()]);
  return kSuccess;
}
int cuStreamBeginCapture_v2(void* stream, int mode) {
  IN_CONTEXT;
  if (uintptr_t(stream) <= 1) return failed(kCaptureUnsupported, "the default stream cannot be captured");
  if (capture_of(stream)) return failed(kInvalidHandle, "a stream that is captured already");
  captures[stream] = {mode, std::this_thread::get_id(), current(), new Graph, false};
  return status();
}
int cuStreamEndCapture(void* stream, Graph** graph) {
  IN_CONTEXT;
  const Capture* const found = capture_of(stream);
  if (!found) return failed(kNotCapturing, "a stream that is not captured");
  if (found->mode != kRelaxed && found->thread != std::this_thread::get_id()) return kCaptureWrongThread;
  const Capture capture = *found;
  captures.erase(stream);
  *graph = capture.is_broken ? nullptr : capture.graph;
  if (capture.is_broken) delete capture.graph;
  return capture.is_broken ? kCaptureInvalidated : status();
}
int cuStreamIsCapturing(void* stream, int* answer) {
  IN_CONTEXT;
  const Capture* const capture = capture_of(stream);
  *answer = !capture ? 0 : capture->is_broken ? 2 : 1;
  return default_stream_call(stream);
}
int cuGraphInstantiateWithFlags(Graph** copy, const Graph* graph, unsigned long long) { *copy = new Graph(*graph); return kSuccess; }
int cuGraphDestroy(Graph* graph) { delete graph; return kSuccess; }
int cuGraphExecDestroy(Graph* graph) { delete graph; return kSuccess; }
int cuGraphLaunch(const Graph* graph, void* stream) {
  IN_CONTEXT;
  for (const auto& work : graph->works)
    if (const int error = put(stream, work)) return error;
  return status();
}

// ---- events --------------------------------------------------------------------------------------------
int cuEventCreate(Event** event, unsigned flags) {
  IN_CONTEXT;
  *event = new Event;
  (*event)->blocks = flags & kBlockingSync;
  (*event)->is_timed = !(flags & kDisableTiming);
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
  event->is_captured = capture_of(handle);
  if (!event->is_captured) static_cast<streams::Point&>(*event) = streams::end_of(stream), event->recorded_at = streams::now();
  return status();
}
int cuEventSynchronize(const Event* event) {
  IN_CONTEXT;
  if (event->is_captured) return failed(kCapturedEvent, "a wait for an event of a graph");
  UNSAFE;
  if (!event->blocks) return failed(kInvalidHandle, "a wait for this event would keep a processor busy");
  streams::run_until(*event);
  return status();
}
int cuEventElapsedTime(float* milliseconds, const Event* from, const Event* to) {
  IN_CONTEXT;
  if (!from->is_timed || !to->is_timed) return failed(kInvalidHandle, "the time of an event that has none");
  if (!streams::is_passed(*from) || !streams::is_passed(*to)) return kNotReady;
  *milliseconds = float(double(reached_at(*to) - reached_at(*from)) / 1e6);
  return kSuccess;
}
int cuEventQuery(const Event* event) {
  IN_CONTEXT;
  if (event->is_captured) return failed(kCapturedEvent, "a question for an event of a graph");
  UNSAFE;
  if (streams::is_passed(*event)) return status();
  streams::run_one(event->stream);
  return kNotReady;
}
}
