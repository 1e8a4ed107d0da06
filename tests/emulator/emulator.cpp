// emulator.cpp -- TEST ONLY. Runs a kernel's threads as fibers, which run until they wait for each other: the blocks one
// after the other, or several at once in a drawn order, where a thread may also stop before an atomic. Found in every
// build: barriers that not all threads reach, deadlocks, launches past the limits, and results that depend on the order
// of threads or blocks or on shared memory that nobody wrote.
#include "emulator.h"
#include <link.h>
#include <sys/mman.h>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <vector>
#ifndef __x86_64__
#error "write switch_stacks for this machine"
#endif

// Keeps the registers that a callee must keep on the old stack, and goes on with those of the new one.
extern "C" void switch_stacks(void** old_top, void* new_top);
asm(R"(
.text
.type switch_stacks, @function
switch_stacks:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size switch_stacks, .-switch_stacks
)");

Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {
namespace {
constexpr size_t kStackBytes = 128 << 10, kPage = 4096, kMaxThreads = 1024, kMaxShared = 48 << 10;
constexpr unsigned kWarp = 32, kMaxBlocks = 0x7fffffff;
constexpr int kShuffled = 2;                // orders from here on are seeds
constexpr unsigned kResident = 3;           // blocks at once, in a shuffled order
constexpr unsigned kVainAtomics = 1 << 20;  // in a row, none of which changed anything: threads wait for ever
constexpr unsigned char kPoison = 0xa5, kCanary = 0x5a;
constexpr size_t kCanaryBytes = 64;
enum State { kFresh, kReady, kAtBlock, kAtWarp, kDone };
struct Fiber { unsigned char* stack; void* top; };
struct Thread {
  State state;
  Fiber fiber;
  const char* call;
  int line;
  unsigned mask, took;
  uint64_t mine, *got;
};
std::vector<Kernel>& kernels() {
  static std::vector<Kernel> all;
  return all;
}
std::mutex one_launch;  // what follows belongs to the launch that holds it
const Kernel* kernel;
void** arguments;
// What an SM has room for: a block that runs, then the next one. Its memory stays for the next launch.
struct Slot {
  unsigned block, number;
  bool taken;
  std::vector<Thread> threads;
  std::vector<unsigned char> shared, fixed;  // `fixed`: what fixed_shared holds while another block runs
};
Slot slots[kResident];
Slot* now;                    // the one that runs
unsigned num_slots;
std::mt19937 random_numbers;
unsigned vain_atomics;
unsigned char* fixed_shared;  // the __shared__ variables of all kernels, thread-local memory of this library
size_t fixed_shared_bytes;
thread_local unsigned char in_fixed_shared;
std::vector<unsigned char*> idle_stacks;
void* scheduler_top;
std::string error;

void leave() { switch_stacks(&now->threads[threadIdx.x].fiber.top, scheduler_top); }
void thread_main() {
  kernel->call(*kernel, arguments);
  now->threads[threadIdx.x].state = kDone;
  leave();
  abort();  // a thread that is done gets no turn
}
// Stack tops that share no cache set, each above a page that must not be touched.
Fiber new_fiber(size_t number) {
  unsigned char* stack;
  if (idle_stacks.empty()) {
    void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, kPage, PROT_NONE)) abort();
    stack = static_cast<unsigned char*>(memory);
  } else {
    stack = idle_stacks.back();
    idle_stacks.pop_back();
  }
  void** top = reinterpret_cast<void**>(stack + kStackBytes - number * 1088 % 32768) - 1;  // aligned as after a call
  *--top = reinterpret_cast<void*>(&thread_main);
  for (int registers = 0; registers < 6; ++registers) *--top = nullptr;
  return {stack, top};
}
void run_thread(unsigned t) {
  Thread& thread = now->threads[t];
  if (thread.state == kFresh) thread.fiber = new_fiber(t);
  thread.state = kReady;
  threadIdx.x = t;
  if (kChecked) check_thread(thread.fiber.stack, kStackBytes);
  switch_stacks(&scheduler_top, thread.fiber.top);
  if (thread.state != kReady) vain_atomics = 0;
  if (thread.state == kDone) idle_stacks.push_back(thread.fiber.stack);
}
// Lets the lanes of one mask go on when all of them that have not exited have come to the same call.
bool release_warp(Thread* warp, unsigned lane) {
  const Thread& first = warp[lane];
  unsigned took = 0;
  for (unsigned other = 0; other < kWarp; ++other) {
    const Thread& o = warp[other];
    if (!(first.mask >> other & 1) || o.state == kDone) continue;
    if (o.state != kAtWarp || o.line != first.line || o.mask != first.mask || strcmp(o.call, first.call)) return false;
    took |= 1u << other;
  }
  if (kChecked && !first.got) check_sync_warp(unsigned(warp - now->threads.data()) / kWarp, took);
  for (unsigned other = 0; other < kWarp; ++other) {
    if (!(took >> other & 1)) continue;
    for (unsigned from = 0; warp[other].got && from < kWarp; ++from) warp[other].got[from] = warp[from].mine;
    warp[other].took = took;
    warp[other].state = kReady;
  }
  return true;
}
bool release_warps() {
  bool any = false;
  auto& threads = now->threads;
  for (size_t t = 0; t < threads.size(); ++t)
    if (threads[t].state == kAtWarp) any |= release_warp(&threads[t / kWarp * kWarp], t % kWarp);
  return any;
}
bool release_block() {
  auto& threads = now->threads;
  for (const Thread& t : threads)
    if (t.state != kAtBlock || t.line != threads[0].line) return false;
  for (Thread& t : threads) t.state = kReady;
  if (kChecked) check_sync_block();
  return true;
}
// Who waits where, a line for each run of threads that wait for the same.
std::string stuck() {
  std::string text = "threads wait for each other: not all of them reach a barrier";
  char part[160];
  const auto& threads = now->threads;
  for (size_t t = 0; t < threads.size() && text.size() < 600; ++t) {
    const Thread& a = threads[t];
    if (t && a.state == threads[t - 1].state && a.line == threads[t - 1].line) continue;
    if (a.state == kDone) snprintf(part, sizeof part, "; thread %zu.. has exited", t);
    else if (a.state == kAtBlock) snprintf(part, sizeof part, "; thread %zu.. is in __syncthreads of line %d", t, a.line);
    else snprintf(part, sizeof part, "; thread %zu.. is in %s(%#x) of line %d", t, a.call, a.mask, a.line);
    text += part;
  }
  return text;
}
void go_on(Slot& slot) {
  if (now != &slot) {
    if (now) now->fixed.assign(fixed_shared, fixed_shared + fixed_shared_bytes);
    if (!slot.fixed.empty()) std::copy(slot.fixed.begin(), slot.fixed.end(), fixed_shared);
    now = &slot;
    if (kChecked) check_slot(slot.number);
  }
  blockIdx.x = slot.block;
}
void start(Slot& slot, unsigned block) {
  slot.block = block;
  slot.taken = true;
  go_on(slot);
  std::fill(slot.shared.begin(), slot.shared.end() - kCanaryBytes, kPoison);
  std::fill(slot.shared.end() - kCanaryBytes, slot.shared.end(), kCanary);
  std::fill_n(fixed_shared, fixed_shared_bytes, kPoison);
  for (Thread& t : slot.threads) t.state = kFresh;
  if (kChecked) check_block();
}
// Each thread that can has a turn. An end of the block frees its slot.
void run_round(Slot& slot, int order) {
  go_on(slot);
  std::vector<unsigned> turns(slot.threads.size());
  std::iota(turns.begin(), turns.end(), 0u);
  if (order == 1) std::reverse(turns.begin(), turns.end());
  if (order >= kShuffled) std::shuffle(turns.begin(), turns.end(), random_numbers);
  bool moved = false;
  for (unsigned t : turns) {
    if (slot.threads[t].state != kFresh && slot.threads[t].state != kReady) continue;
    run_thread(t);
    if (!error.empty()) return;
    moved = true;
  }
  if (release_warps() || moved) return;
  slot.taken = !std::all_of(slot.threads.begin(), slot.threads.end(), [](const Thread& t) { return t.state == kDone; });
  if (slot.taken && !release_block()) return void(error = stuck());
  if (!slot.taken && std::any_of(slot.shared.end() - kCanaryBytes, slot.shared.end(), [](unsigned char byte) { return byte != kCanary; }))
    error = "a write past the end of shared memory";
}
int find_fixed_shared(dl_phdr_info* info, size_t, void*) {
  const auto* const here = static_cast<unsigned char*>(info->dlpi_tls_data);
  for (int i = 0; here && i < info->dlpi_phnum; ++i) {
    const size_t bytes = info->dlpi_phdr[i].p_memsz;
    if (info->dlpi_phdr[i].p_type != PT_TLS || &in_fixed_shared < here || &in_fixed_shared >= here + bytes) continue;
    fixed_shared = static_cast<unsigned char*>(info->dlpi_tls_data);
    fixed_shared_bytes = bytes;
  }
  return 0;
}
// Order 1 is backwards. From kShuffled on it is drawn which blocks run at once, and which of them has the next round.
void run_blocks(unsigned first, int order) {
  std::vector<unsigned> blocks(gridDim.x - first);
  std::iota(blocks.begin(), blocks.end(), first);
  if (order >= kShuffled) std::shuffle(blocks.begin(), blocks.end(), random_numbers);
  else if (order == 0) std::reverse(blocks.begin(), blocks.end());
  for (;;) {
    Slot* running[kResident];
    unsigned count = 0;
    for (unsigned i = 0; i < num_slots; ++i) {
      if (!slots[i].taken && !blocks.empty()) {
        start(slots[i], blocks.back());
        blocks.pop_back();
      }
      if (slots[i].taken) running[count++] = &slots[i];
    }
    if (!count) return;
    run_round(*running[count == 1 ? 0 : random_numbers() % count], order);
    if (!error.empty()) return;
  }
}
}  // namespace

Registered::Registered(const Kernel& registered) { kernels().push_back(registered); }

const Kernel* find_kernel(const char* name) {
  for (const Kernel& k : kernels())
    if (!strcmp(k.name, name)) return &k;
  return nullptr;
}
const char* over_limits(const Kernel& k, unsigned first, unsigned blocks, unsigned block_threads, size_t shared_bytes) {
  if (first >= blocks || blocks > kMaxBlocks) return "the grid is empty or has more than 2**31 - 1 blocks";
  if (!block_threads || block_threads > kMaxThreads) return "a block has 1 to 1024 threads";
  if (block_threads > k.max_threads) return "more threads in a block than the kernel's __launch_bounds__";
  if (block_threads % kWarp) return "blocks are whole warps here";
  return shared_bytes > kMaxShared ? "more than 48 KiB of shared memory, which a kernel must ask for" : nullptr;
}
void fail(const char* format, ...) {
  char text[700];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  error = text;
  leave();
  abort();  // the launch has ended
}
const char* launch(const Kernel& k, unsigned first_block, unsigned blocks, unsigned block_threads, size_t shared_bytes,
                   void** values, int order) {
  const std::lock_guard<std::mutex> hold(one_launch);
  if (const char* limit = over_limits(k, first_block, blocks, block_threads, shared_bytes)) return limit;
  kernel = &k;
  arguments = values;
  error.clear();
  blockDim.x = block_threads;
  gridDim.x = blocks;
  dl_iterate_phdr(find_fixed_shared, nullptr);
  if (kChecked) check_launch(fixed_shared, fixed_shared_bytes);
  num_slots = order >= kShuffled ? kResident : 1;
  for (unsigned i = 0; i < num_slots; ++i) {
    Slot& slot = slots[i];
    slot.number = i;
    slot.taken = false;
    slot.shared.resize(shared_bytes + kCanaryBytes);
    slot.fixed.clear();
    slot.threads.resize(block_threads);
    for (Thread& t : slot.threads) t.state = kDone;
    if (kChecked) check_shared(slot.shared.data(), shared_bytes);
  }
  now = nullptr;
  vain_atomics = 0;
  random_numbers.seed(unsigned(order));
  run_blocks(first_block, order);
  if (kChecked) check_end();
  if (error.empty()) return nullptr;
  for (unsigned i = 0; i < num_slots; ++i)  // stopped half-way
    for (const Thread& t : slots[i].threads)
      if (t.state != kFresh && t.state != kDone) idle_stacks.push_back(t.fiber.stack);
  char where[200];
  snprintf(where, sizeof where, " [%s, block %u, thread %u]", k.name, blockIdx.x, threadIdx.x);
  return (error += where).c_str();
}
}  // namespace emulator

using namespace emulator;
unsigned char* emulated_shared() { return now->shared.data(); }
void emulated_fail_at(int line, const char* message) { fail("line %d: %s", line, message); }
void emulated_sync_block(int line) {
  Thread& me = now->threads[threadIdx.x];
  me.state = kAtBlock;
  me.line = line;
  leave();
}
unsigned emulated_sync_warp(const char* call, int line, unsigned mask, uint64_t mine, uint64_t* got) {
  const unsigned lane = threadIdx.x % kWarp;
  if (!(mask >> lane & 1)) fail("line %d: lane %u calls %s(%#x), a mask that leaves it out", line, lane, call, mask);
  Thread& me = now->threads[threadIdx.x];
  me.state = kAtWarp;
  me.call = call;
  me.line = line;
  me.mask = mask;
  me.mine = mine;
  me.got = got;
  leave();
  return me.took;
}
void emulated_atomic_read(const void* place, void* old, size_t size) {
  if (vain_atomics >= kVainAtomics) fail("threads wait for what no thread does: is it for a block that has not started?");
  if (num_slots > 1 && random_numbers() % 2) leave();  // still kReady
  if (kChecked) check_atomic(place, size, __builtin_return_address(0));
  memcpy(old, place, size);
}
void emulated_atomic_write(void* place, const void* value, size_t size) {
  vain_atomics = memcmp(place, value, size) ? 0 : vain_atomics + 1;
  memcpy(place, value, size);
}

// For tests/python/support/kernels.py: null, or what went wrong; the sizes of a kernel's parameters, then 0, or null; its
// launch bounds.
extern "C" const char* emulated_launch(const char* name, unsigned first_block, unsigned blocks, unsigned block_threads,
                                       size_t shared_bytes, void** values, int order) {
  const Kernel* const found = find_kernel(name);
  return found ? launch(*found, first_block, blocks, block_threads, shared_bytes, values, order) : "no such kernel";
}
extern "C" const size_t* emulated_parameters(const char* name) {
  const Kernel* const found = find_kernel(name);
  return found ? found->sizes : nullptr;
}
extern "C" unsigned emulated_max_threads(const char* name) {
  const Kernel* const found = find_kernel(name);
  return found ? found->max_threads : 0;
}
