// emulator.h -- TEST ONLY. Interface between the parts of the emulator; kernels see cuda_on_cpu.h only.
#pragma once
#include "cuda_on_cpu.h"

namespace emulator {
const Kernel* find_kernel(const char* name);
// Returns the reason why the driver would refuse a launch, or null.
const char* over_limits(const Kernel& kernel, unsigned first_block, unsigned blocks, unsigned threads, size_t shared_bytes);
// Runs the blocks of a grid, starting with the first. Order of threads and blocks: 0 forward, 1 reverse, blocks one
// after the other; otherwise a seed: blocks in a shuffled order, three at once, whose threads take turns in an order
// drawn again at every round and stop before some atomics. Returns null or an error, kept until the next launch. One
// launch at a time.
const char* launch(const Kernel& kernel, unsigned first_block, unsigned blocks, unsigned threads, size_t shared_bytes,
                   void** arguments, int order);
// Ends the launch from within a kernel.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// State that checks.cpp needs, in a build with CHECKED=1.
#ifdef EVERMOE_CHECKED
constexpr bool kChecked = true;
#else
constexpr bool kChecked = false;
#endif
void check_launch(const void* fixed, size_t fixed_bytes);
void check_shared(const void* dynamic, size_t bytes);  // of the next slot
void check_slot(unsigned number); // continues with the block in a slot
void check_block(); // the slot has a new block
void check_thread(const void* stack, size_t bytes);
void check_sync_block();
void check_sync_warp(unsigned warp, unsigned mask);
void check_atomic(const void* place, size_t size, void* pc);
void check_end();
}  // namespace emulator
