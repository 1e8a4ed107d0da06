// emulator.h -- TEST ONLY. What the parts of the emulator tell each other; kernels see cuda_on_cpu.h alone.
#pragma once
#include "cuda_on_cpu.h"

namespace emulator {
const Kernel* find_kernel(const char* name);
// Runs the blocks one after the other. Order: 0 forward, 1 reverse, else the seed of a shuffle that is drawn anew at
// every round. Null, or what went wrong, kept until the next launch. One launch at a time.
const char* launch(const Kernel& kernel, unsigned blocks, unsigned threads, size_t shared_bytes, void** arguments, int order);
// Ends the launch from within a kernel.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
}  // namespace emulator
