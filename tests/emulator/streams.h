// streams.h -- TEST ONLY. Streams of the stand-in driver: queues whose work runs as late, or in as unlucky an order, as
// CUDA allows, so that a missing wait becomes visible in the results.
//
// Example: a kernel on stream A, a copy of its result on stream B, no wait between them. Synchronizing B runs the copy
// alone under kLate, and synchronizing A runs the copy first under kEarly: both copy the previous contents.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>

namespace streams {
struct Stream;
enum Policy {
  kLate,    // work runs when something waits for it, and nothing else does
  kEarly,   // before it, whatever else may run does, the stream that was asked last first
  kRandom,  // and from here on a seed: works of all streams in random order
};
// A point in a stream: it is passed when the first `position` works have run.
struct Point {
  Stream* stream = nullptr;
  uint64_t position = 0;
};
// Memory of the host that a work uses.
struct HostRange {
  const void* begin = nullptr;
  size_t bytes = 0;
};

void set_policy(int policy);
int policy();
// A stream of a context that waits for its default one, and the other way round, unless it is said not to.
Stream* create(const void* context, bool waits_for_default);
bool waits_for_default(const void* handle);
void destroy(Stream* stream);          // its work still runs
Stream* of_handle(void* handle, const void* context);  // null if there is none: null and 1 are the context's default stream
// A work with `ready` waits at the front of its stream until that says so: it is called whenever the work might run.
void ask(Stream* stream, std::function<int()> work, HostRange host = {}, std::function<bool()> ready = {});
void ask_to_wait(Stream* stream, Point point);
size_t length(const Stream* stream);    // works that have not run
Point end_of(Stream* stream);           // with what the default stream makes it wait for
bool is_passed(Point point);
int64_t now();                         // nanoseconds of a clock
int64_t passed_at(Point point);        // of a point that is passed, on the same clock; 0 if no work is before it
void set_pause(void (*pause)());       // what is called between two looks whether a work is ready
bool try_until(Point point);           // as `run_until`, but it ends at a work that is not ready; returns whether all has run
void run_until(Point point);
void run_one(Stream* stream);          // if there is work that need not wait
void run_all(const void* context);
bool is_idle(const void* context);
bool is_used(HostRange host);          // by work that has not run
// The first error of a context's work that has run: it stays, and the context's other work is dropped.
constexpr int kIllegalAddress = 700;
int error(const void* context);
void plant_fault(int works); // the work that comes `works` from now accesses an invalid address; 0: none does
void heal();                           // as in a new process: no errors, no work
}  // namespace streams
