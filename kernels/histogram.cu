// histogram.cu -- tokens per expert of several layers: counts[l, e] += #{ s : ids_l[s] == e }. Ids outside 0..E are not
// counted.
//
// Example: ids = [0, 2, 2, -1] and [1], E = 3  ->  counts += [[1, 0, 2], [0, 1, 0]].
// Caller owns and zeroes counts. Integer atomics, so the result does not depend on the order of threads.
#include "common.cuh"

// Counts the ids of this block, which is number `block` of the layer's `num_blocks`.
template <typename Id>
__device__ inline void count_ids(const Id* __restrict__ ids, unsigned* __restrict__ block_counts_E, size_t num_slots,
                                 size_t num_experts, size_t block, size_t num_blocks) {
  for (size_t s = block * blockDim.x + threadIdx.x; s < num_slots; s += num_blocks * blockDim.x) {
    const Id id = ids[s];
    if (id >= 0 && static_cast<size_t>(id) < num_experts) atomicAdd(&block_counts_E[id], 1u);
  }
}

// Launch: 1-D grid of as many blocks as the last layer's end_block, dynamic shared memory for num_experts uint32_t.
extern "C" __global__ void expert_histograms(unsigned long long* __restrict__ counts_LE,  // [num_layers, num_experts]  device, zeroed
                                             size_t num_layers, size_t num_experts,
                                             const __grid_constant__ LayersIds layers) {
  EVERMOE_DYNAMIC_SHARED(unsigned, block_counts_E);
  for (size_t e = threadIdx.x; e < num_experts; e += blockDim.x) block_counts_E[e] = 0;
  size_t l = 0;
  while (l + 1 < num_layers && blockIdx.x >= layers.at[l].end_block) ++l;
  const LayerIds& layer = layers.at[l];
  const size_t first_block = l > 0 ? layers.at[l - 1].end_block : 0;
  const size_t block = blockIdx.x - first_block, num_blocks = layer.end_block - first_block;
  __syncthreads();
  if (layer.is_wide)
    count_ids(static_cast<const int64_t*>(layer.ids), block_counts_E, layer.num_slots, num_experts, block, num_blocks);
  else
    count_ids(static_cast<const int32_t*>(layer.ids), block_counts_E, layer.num_slots, num_experts, block, num_blocks);
  __syncthreads();
  for (size_t e = threadIdx.x; e < num_experts; e += blockDim.x) {
    const unsigned count = block_counts_E[e];
    if (count) atomicAdd(&counts_LE[l * num_experts + e], static_cast<unsigned long long>(count));
  }
}
