// histogram.cu -- tokens per expert: counts_E[e] += #{ s : ids[s] == e }. Ids outside 0..E are not counted.
//
// Example: ids = [0, 2, 2, -1], E = 3  ->  counts_E += [1, 0, 2].
// Caller owns and zeroes counts_E. Integer atomics, so the result does not depend on the order of threads.
#include "common.cuh"

// Launch: 1-D grid of any size, dynamic shared memory for num_experts uint32_t.
template <typename Id>
__device__ void histogram(const Id* __restrict__ ids,             // [num_slots]    device
                          unsigned long long* __restrict__ counts_E,  // [num_experts]  device, zeroed
                          size_t num_slots, size_t num_experts) {
  EVERMOE_DYNAMIC_SHARED(unsigned, block_counts_E);
  for (size_t e = threadIdx.x; e < num_experts; e += blockDim.x) block_counts_E[e] = 0;
  __syncthreads();
  for (size_t s = global_thread(); s < num_slots; s += num_threads()) {
    const Id id = ids[s];
    if (id >= 0 && static_cast<size_t>(id) < num_experts) atomicAdd(&block_counts_E[id], 1u);
  }
  __syncthreads();
  for (size_t e = threadIdx.x; e < num_experts; e += blockDim.x) {
    const unsigned count = block_counts_E[e];
    if (count) atomicAdd(&counts_E[e], static_cast<unsigned long long>(count));
  }
}

extern "C" __global__ void expert_histogram_i32(const int32_t* ids, unsigned long long* counts_E, size_t num_slots,
                                                size_t num_experts) {
  histogram(ids, counts_E, num_slots, num_experts);
}
extern "C" __global__ void expert_histogram_i64(const int64_t* ids, unsigned long long* counts_E, size_t num_slots,
                                                size_t num_experts) {
  histogram(ids, counts_E, num_slots, num_experts);
}
