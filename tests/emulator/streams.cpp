// streams.cpp -- TEST ONLY. See streams.h.
#include "streams.h"
#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <vector>

namespace streams {
namespace {
struct Work {
  std::function<int()> run;
  HostRange host;
  Point after;
  std::function<bool()> ready;
};
}  // namespace
struct Stream {
  const void* context = nullptr;
  bool is_default = true, waits_for_default = true, is_open = true;
  std::deque<Work> works;
  uint64_t asked = 0, ran = 0, last_asked = 0;
  std::vector<int64_t> ran_at;  // nanoseconds, by work
};

namespace {
std::vector<std::unique_ptr<Stream>> all;  // they live on, as points may name them
std::map<const void*, int> errors;         // of contexts
uint64_t num_asked;
int chosen_policy, works_to_fault;
std::mt19937 random_numbers;
void (*pause_of_driver)() = [] {};

Stream* default_stream(const void* context) {
  for (const auto& stream : all)
    if (stream->is_default && stream->context == context) return stream.get();
  all.emplace_back(new Stream);
  all.back()->context = context;
  return all.back().get();
}
bool can_run(const Stream& stream) {
  if (stream.works.empty() || !is_passed(stream.works.front().after)) return false;
  const auto& ready = stream.works.front().ready;
  return !ready || errors[stream.context] || ready();
}
void run_first(Stream& stream) {
  const Work work = std::move(stream.works.front());
  stream.works.pop_front();
  ++stream.ran;
  int& error = errors[stream.context];
  if (work.run && !error)  // nothing runs in a context that has failed
    error = works_to_fault > 0 && --works_to_fault == 0 ? kIllegalAddress : work.run();
  stream.ran_at.resize(stream.ran, now());
}
void put(Stream* stream, Work work) {
  stream->works.push_back(std::move(work));
  ++stream->asked;
  stream->last_asked = ++num_asked;
}
void put_wait(Stream* stream, Point point) {
  if (!is_passed(point)) put(stream, {nullptr, {}, point, {}});
}
// The default stream waits for the others, and they for it, where they are not said not to.
void join(Stream* stream) {
  Stream* const first = default_stream(stream->context);
  if (stream != first && stream->waits_for_default) put_wait(stream, {first, first->asked});
  if (stream != first) return;
  for (const auto& other : all)
    if (other.get() != first && other->context == first->context && other->waits_for_default) put_wait(first, {other.get(), other->asked});
}
// What the point needs, and no more. Others may put and run works in a pause.
void run_needed(Point point) {
  while (!try_until(point)) pause_of_driver();
}
// Whatever can run without a work of `but`, the stream that was asked last first.
void run_others(const Stream* but) {
  std::vector<Stream*> order;
  for (const auto& stream : all)
    if (stream.get() != but) order.push_back(stream.get());
  std::sort(order.begin(), order.end(), [](auto* a, auto* b) { return a->last_asked > b->last_asked; });
  for (bool moved = true; moved;) {
    moved = false;
    for (Stream* stream : order)
      for (; can_run(*stream); moved = true) run_first(*stream);
  }
}
void run_at_random(Point point) {
  for (size_t tries = 0; !is_passed(point); ++tries) {
    Stream& stream = *all[random_numbers() % all.size()];
    if (can_run(stream)) run_first(stream), tries = 0;
    if (tries > 4 * all.size()) pause_of_driver(), tries = 0;  // what is left waits for another process
  }
}
}  // namespace

void set_policy(int chosen) {
  chosen_policy = chosen;
  random_numbers.seed(unsigned(chosen));
}
int policy() { return chosen_policy; }
bool waits_for_default(const void* handle) {
  return std::any_of(all.begin(), all.end(), [=](const auto& s) { return s.get() == handle && s->waits_for_default; });
}
Stream* create(const void* context, bool waits_for_default) {
  default_stream(context);
  all.emplace_back(new Stream);
  all.back()->context = context;
  all.back()->is_default = false;
  all.back()->waits_for_default = waits_for_default;
  return all.back().get();
}
void destroy(Stream* stream) { stream->is_open = false; }
Stream* of_handle(void* handle, const void* context) {
  if (uintptr_t(handle) <= 1) return default_stream(context);
  for (const auto& stream : all)
    if (stream.get() == handle && stream->is_open) return stream.get();
  return nullptr;
}
void ask(Stream* stream, std::function<int()> work, HostRange host, std::function<bool()> ready) {
  join(stream);
  put(stream, {std::move(work), host, {}, std::move(ready)});
}
void ask_to_wait(Stream* stream, Point point) { put_wait(stream, point); }
Point end_of(Stream* stream) {
  join(stream);
  return {stream, stream->asked};
}
size_t length(const Stream* stream) { return stream->works.size(); }
int64_t now() { return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }
int64_t passed_at(Point point) { return point.position ? point.stream->ran_at[point.position - 1] : 0; }
bool is_passed(Point point) { return !point.stream || point.stream->ran >= point.position; }
void set_pause(void (*pause)()) { pause_of_driver = pause; }
// A work waits for such as were asked before it, so that this ends.
bool try_until(Point point) {
  while (!is_passed(point)) {
    const Point after = point.stream->works.front().after;
    if (!try_until(after) || !can_run(*point.stream)) return false;
    run_first(*point.stream);
  }
  return true;
}
void run_until(Point point) {
  if (is_passed(point)) return;
  if (chosen_policy == kEarly) run_others(point.stream);
  if (chosen_policy >= kRandom) run_at_random(point);
  run_needed(point);
}
void run_one(Stream* stream) {
  if (can_run(*stream)) return run_first(*stream);
  if (!stream->works.empty() && !is_passed(stream->works.front().after)) run_one(stream->works.front().after.stream);
}
void run_all(const void* context) {
  if (chosen_policy != kLate) run_others(nullptr);
  for (size_t i = 0; i < all.size(); ++i)
    if (all[i]->context == context) run_needed(end_of(all[i].get()));
}
bool is_idle(const void* context) {
  return std::all_of(all.begin(), all.end(), [=](const auto& s) { return s->context != context || s->works.empty(); });
}
bool is_used(HostRange host) {
  const auto* const begin = static_cast<const char*>(host.begin);
  const auto overlaps = [&](const Work& work) {
    const auto* const other = static_cast<const char*>(work.host.begin);
    return work.host.bytes && other < begin + host.bytes && begin < other + work.host.bytes;
  };
  return std::any_of(all.begin(), all.end(), [&](const auto& s) { return std::any_of(s->works.begin(), s->works.end(), overlaps); });
}
int error(const void* context) { return errors[context]; }
void plant_fault(int works) { works_to_fault = works; }
void heal() {
  for (const auto& stream : all) {
    stream->works.clear();
    stream->ran = stream->asked;
    stream->ran_at.resize(stream->ran, now());
  }
  errors.clear();
  works_to_fault = 0;
}
}  // namespace streams
