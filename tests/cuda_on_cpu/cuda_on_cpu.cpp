// cuda_on_cpu.cpp -- TEST ONLY. Runs a kernel's blocks one after the other; the threads of a block are contexts
// that run until they wait for each other. Found at once: barriers that not all threads reach, deadlocks, reads
// of shared memory that nobody wrote, writes past it, and results that depend on the order of threads.
#include "cuda_on_cpu.h"
#include <ucontext.h>
#include <algorithm>
#include <iterator>
#include <numeric>
#include <random>
#include <string>
#include <vector>

thread_local Index threadIdx, blockIdx, blockDim, gridDim;

namespace {
constexpr size_t kStackBytes = 64 << 10, kCanaryBytes = 64;
constexpr unsigned char kPoison = 0xa5, kCanary = 0x5a;
using Kernel = void (*)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);
// A kernel of at most five arguments and a table by value, which C++ passes as memory whatever it holds: in registers and on
// the stack, so that arguments too many, and words past a smaller table, are not seen.
constexpr size_t kWords = 10, kTableStart = 5, kTableWords = 192;
struct Table { uint64_t words[kTableWords]; };
using TableKernel = void (*)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, Table);
enum State { kReady, kAtBlock, kAtWarp, kDone };
struct Thread {
  ucontext_t context;
  std::vector<unsigned char> stack;
  State state;
  int line;
  unsigned mask;
  uint64_t mine, got[32];
};
std::vector<Thread> threads;
std::vector<unsigned char> shared;
ucontext_t scheduler;
void* kernel;
size_t num_arguments;
uint64_t arguments[kTableStart + kTableWords];

void call_kernel() {
  if (num_arguments > kWords) {
    Table table;
    memcpy(&table, arguments + kTableStart, sizeof table);
    return reinterpret_cast<TableKernel>(kernel)(arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], table);
  }
  reinterpret_cast<Kernel>(kernel)(arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], arguments[5], arguments[6], arguments[7],
         arguments[8], arguments[9]);
}
void thread_main() {
  call_kernel();
  threads[threadIdx.x].state = kDone;
}
void wait(State state, int line) {
  const unsigned me = threadIdx.x;
  threads[me].state = state;
  threads[me].line = line;
  swapcontext(&threads[me].context, &scheduler);
}
// Lets a warp go on when every lane of each mask has come to the same line.
bool release_warp(size_t first) {
  Thread* const warp = &threads[first];
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (warp[lane].state != kAtWarp) continue;
    for (unsigned other = 0; other < 32; ++other) {
      const Thread& o = warp[other];
      if (!(warp[lane].mask >> other & 1)) continue;
      if (o.state != kAtWarp || o.line != warp[lane].line || o.mask != warp[lane].mask) return false;
    }
  }
  bool any = false;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (warp[lane].state != kAtWarp) continue;
    for (unsigned other = 0; other < 32; ++other) warp[lane].got[other] = warp[other].mine;
    any = true;
  }
  for (unsigned lane = 0; lane < 32; ++lane)
    if (warp[lane].state == kAtWarp) warp[lane].state = kReady;
  return any;
}
bool release_block() {
  for (const Thread& t : threads)
    if (t.state != kAtBlock || t.line != threads[0].line) return false;
  for (Thread& t : threads) t.state = kReady;
  return true;
}
const char* run_block(int order, std::mt19937& random) {
  std::fill(shared.begin(), shared.end() - kCanaryBytes, kPoison);
  std::fill(shared.end() - kCanaryBytes, shared.end(), kCanary);
  for (Thread& t : threads) {
    getcontext(&t.context);
    t.context.uc_stack.ss_sp = t.stack.data();
    t.context.uc_stack.ss_size = t.stack.size();
    t.context.uc_link = &scheduler;
    makecontext(&t.context, thread_main, 0);
    t.state = kReady;
  }
  std::vector<unsigned> turns(threads.size());
  std::iota(turns.begin(), turns.end(), 0u);
  if (order == 1) std::reverse(turns.begin(), turns.end());
  for (;;) {
    if (order >= 2) std::shuffle(turns.begin(), turns.end(), random);
    bool moved = false;
    for (unsigned t : turns) {
      if (threads[t].state != kReady) continue;
      threadIdx.x = t;
      swapcontext(&scheduler, &threads[t].context);
      moved = true;
    }
    for (size_t first = 0; first < threads.size(); first += 32) moved |= release_warp(first);
    if (moved) continue;
    if (std::all_of(threads.begin(), threads.end(), [](const Thread& t) { return t.state == kDone; })) break;
    if (!release_block()) return "threads wait for each other: not all of them reach a barrier";
  }
  if (std::any_of(shared.end() - kCanaryBytes, shared.end(), [](unsigned char byte) { return byte != kCanary; }))
    return "a write past the end of shared memory";
  return nullptr;
}
}  // namespace

unsigned char* emulated_shared() { return shared.data(); }
void emulated_sync_block(int line) { wait(kAtBlock, line); }
void emulated_sync_warp(int line, unsigned mask, uint64_t mine, uint64_t* got) {
  Thread& me = threads[threadIdx.x];
  me.mask = mask;
  me.mine = mine;
  wait(kAtWarp, line);
  if (got) memcpy(got, me.got, sizeof me.got);
}

// Order: 0 forward, 1 reverse, else the seed of a shuffle that is drawn anew at every round. Null, or what went wrong.
extern "C" const char* launch(void* function, unsigned blocks, unsigned block_threads, size_t shared_bytes,
                              const uint64_t* values, size_t count, int order) {
  const bool fits = count <= kTableStart + kTableWords;
  if (!fits || block_threads % 32 || block_threads > 1024 || !blocks || shared_bytes > 48 << 10) return "launch limits";
  kernel = function;
  num_arguments = count;
  std::fill(std::copy(values, values + count, arguments), std::end(arguments), 0);
  shared.resize(shared_bytes + kCanaryBytes);
  threads.resize(block_threads);
  for (Thread& t : threads) t.stack.resize(kStackBytes);
  blockDim.x = block_threads;
  gridDim.x = blocks;
  std::mt19937 random(order);
  for (unsigned block = 0; block < blocks; ++block) {
    blockIdx.x = order == 1 ? blocks - 1 - block : block;
    if (const char* error = run_block(order, random)) return error;
  }
  return nullptr;
}
