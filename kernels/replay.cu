// replay.cu -- the optimizers' steps: those of a trainer, and those that a replica repeats from its log.
//
// The arithmetic is that of src/cpu/adamw.rs and src/cpu/sgd.rs, bit for bit: each operation is one correctly rounded
// intrinsic, which nvcc neither fuses nor approximates (-use_fast_math would flush subnormals and must not be used).
// Several steps take one pass over the memory, and several tensors one launch. The same pass multiplies gradients by
// the clip factor, and writes weights of 16 bits whose master p is. Caller owns all memory.
//
// Example: AdamW, p 4, m and v 0, gradient 2, numbers decay 0.75, one_minus_beta1 0.5, one_minus_beta2 0.25, beta2 0.75,
// step_size 1, bias_correction2_sqrt 0.5, eps 0: m = fma(0.5, 2 - 0, 0) = 1, v = fma(0.25 * 2, 2, 0 * 0.75) = 1,
// p = 4 * 0.75 - (1 * 1) / (1 / 0.5 + 0) = 2.5.
// SGD, p 4, buffer 6, gradient 2, numbers decay 0.25, momentum 0.5, one_minus_dampening 1, lr 0.5: g = fma(4, 0.25, 2) = 3,
// buffer = fma(3, 1, 6 * 0.5) = 6, p = fma(6, -0.5, 4) = 1.
#include "common.cuh"

template <typename Step>
__device__ inline float scaled(const Step& step, float g) {
  if (step.loss_scale != 1.0f) g = __fdiv_rn(g, step.loss_scale);  // a division takes time
  return __fmul_rn(g, step.factor);
}

// One element. `in_tail`: among the last ones, which torch's CPU loops treat differently.
__device__ inline void take_step(const AdamWStep& step, float g, bool in_tail, float (&state)[3]) {
  float &p = state[0], &m = state[1], &v = state[2];
  g = scaled(step, g);
  const float square_of_g = __fmul_rn(g, g);
  if (step.arithmetic == kTorchCudaFused) {
    if (__float_as_uint(step.decay) != 0) p = __fmaf_rn(p, step.decay, p);
    const float beta1 = step.one_minus_beta1; // under this arithmetic the field holds beta1
    m = __fmaf_rn(m, beta1, __fmaf_rn(g, -beta1, g));
    v = __fmaf_rn(v, step.beta2, __fmaf_rn(square_of_g, -step.beta2, square_of_g));
  } else {
    p = __fmul_rn(p, step.decay);
    const bool near = step.one_minus_beta1 < 0.5f; // the nearer end to start from: m, or g
    const float slope = near ? step.one_minus_beta1 : -__fsub_rn(1.0f, step.one_minus_beta1);
    m = __fmaf_rn(slope, __fsub_rn(g, m), near ? m : g);
    const float part = __fmul_rn(step.one_minus_beta2, g), kept = __fmul_rn(v, step.beta2);
    if (step.arithmetic == kTorchCudaForeach) v = __fmaf_rn(square_of_g, step.one_minus_beta2, kept);
    else if (in_tail && step.arithmetic == kTorchCpuFused) v = __fmaf_rn(v, step.beta2, __fmul_rn(part, g));
    else v = __fmaf_rn(part, g, kept);
  }
  const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), step.bias_correction2_sqrt), step.eps);
  const bool divides_first = step.arithmetic == kTorchCudaForeach;
  const float quotient = __fdiv_rn(divides_first ? m : __fmul_rn(step.step_size, m), denominator);
  p = divides_first ? __fmaf_rn(quotient, -step.step_size, p) : __fsub_rn(p, quotient);
}
__device__ inline float decayed(const SgdStep& step, float p, float g) {
  g = scaled(step, g);
  return step.decay == 0.0f ? g : __fmaf_rn(p, step.decay, g);
}
__device__ inline void take_step(const SgdStep& step, float g, bool, float (&state)[1]) {
  state[0] = __fmaf_rn(decayed(step, state[0], g), -step.lr, state[0]);
}
__device__ inline void take_step(const SgdStep& step, float g, bool in_tail, float (&state)[2]) {
  float &p = state[0], &buffer = state[1];
  g = decayed(step, p, g);
  if (step.momentum != 0.0f) {
    if (step.is_first != 0.0f) buffer = g;
    else if (in_tail && step.arithmetic == kTorchCpuFused)
      buffer = __fmaf_rn(buffer, step.momentum, __fmul_rn(g, step.one_minus_dampening));
    else buffer = __fmaf_rn(g, step.one_minus_dampening, __fmul_rn(buffer, step.momentum));
    g = step.nesterov != 0.0f ? __fmaf_rn(buffer, step.momentum, g) : buffer;
  }
  p = __fmaf_rn(g, -step.lr, p);
}

template <typename Row, int kCount>
__device__ inline void load_gradient(const void* gradient, size_t first, float* g) {
  const auto here = *reinterpret_cast<const Pack<Row, kCount>*>(static_cast<const Row*>(gradient) + first);
  for (int i = 0; i < kCount; ++i) g[i] = to_float(here.at[i]);
}

template <typename Row, int kCount, int kArrays>
__device__ inline void store_rounded(void* rounded, size_t first, const float (&state)[kCount][kArrays]) {
  Pack<Row, kCount> here;
  for (int i = 0; i < kCount; ++i) here.at[i] = from_float<Row>(state[i][0]);
  *reinterpret_cast<Pack<Row, kCount>*>(static_cast<Row*>(rounded) + first) = here;
}

// All steps of the elements first..first + kCount.
template <int kCount, int kArrays, typename Step>
__device__ inline void take_steps(const Batch<Step>& batch, const Stepped& tensor, float* const (&arrays)[kArrays],
                                  bool in_tail, size_t first) {
  using Floats = Pack<float, kCount>;
  float state[kCount][kArrays];
  for (int a = 0; a < kArrays; ++a) {
    const Floats here = *reinterpret_cast<const Floats*>(arrays[a] + first);
    for (int i = 0; i < kCount; ++i) state[i][a] = here.at[i];
  }
  for (unsigned s = 0; s < tensor.num_steps; ++s) {
    const Step& step = batch.steps[tensor.first_step + s];
    const void* gradient = batch.gradients[tensor.first_gradient + s];
    const GradientKind kind = batch.kinds[tensor.first_gradient + s];
    float g[kCount] = {};
    if (kind == kFloat32) load_gradient<float, kCount>(gradient, first, g);
    if (kind == kBfloat16) load_gradient<Bf16, kCount>(gradient, first, g);
    for (int i = 0; i < kCount; ++i) take_step(step, g[i], in_tail, state[i]);
  }
  for (int a = 0; a < kArrays; ++a) {
    Floats here;
    for (int i = 0; i < kCount; ++i) here.at[i] = state[i][a];
    *reinterpret_cast<Floats*>(arrays[a] + first) = here;
  }
  if (!tensor.rounded) return;
  if (tensor.flags & kToFloat16) store_rounded<Fp16>(tensor.rounded, first, state);
  else store_rounded<Bf16>(tensor.rounded, first, state);
}

// A thread's elements of a tensor. A pack lies either in torch's tail or before it, as a tail begins at a multiple of
// 8.
template <int kCount, int kArrays, typename Step>
__device__ inline void take_all(const Batch<Step>& batch, const Stepped& tensor, size_t thread, size_t threads) {
  float* arrays[kArrays];
  for (int a = 0; a < kArrays; ++a) arrays[a] = tensor.arrays[a];
  const size_t num_elements = tensor.num_elements, num_packs = num_elements / kCount;
  const size_t tail = num_elements - num_elements % kTorchLanes;
  for (size_t i = thread; i < num_packs; i += threads)
    take_steps<kCount>(batch, tensor, arrays, i * kCount >= tail, i * kCount);
  for (size_t i = num_packs * kCount + thread; i < num_elements; i += threads)
    take_steps<1>(batch, tensor, arrays, i >= tail, i);
}

// The tensor of this block: its index is the number of tensors whose blocks end before this one.
__device__ inline const Stepped& tensor_of_block(const Stepped (&tensors)[kMaxTensors], size_t& first_block) {
  unsigned t = 0;
  for (unsigned half = kMaxTensors / 2; half > 0; half /= 2)
    if (tensors[t + half - 1].end_block <= blockIdx.x) t += half;
  first_block = t > 0 ? tensors[t - 1].end_block : 0;
  return tensors[t];
}

template <int kArrays, typename Step>
__device__ inline void take_block(const Batch<Step>& batch, const Stepped& tensor, size_t first_block) {
  const size_t thread = (blockIdx.x - first_block) * blockDim.x + threadIdx.x;
  const size_t threads = (tensor.end_block - first_block) * blockDim.x;
  if (tensor.flags & kInPacks) take_all<4, kArrays>(batch, tensor, thread, threads);
  else take_all<1, kArrays>(batch, tensor, thread, threads);
}

constexpr int kSteppingBlocks = 5;  // of a multiprocessor: at most 48 registers
// Launch: 1-D grid of as many blocks as the last tensor's end_block.
extern "C" __global__ __launch_bounds__(256, kSteppingBlocks) void adamw(const __grid_constant__ Batch<AdamWStep> batch) {
  size_t first_block;
  const Stepped& tensor = tensor_of_block(batch.tensors, first_block);
  take_block<3>(batch, tensor, first_block);
}
// A tensor without a buffer has no step with momentum.
extern "C" __global__ __launch_bounds__(256, kSteppingBlocks) void sgd(const __grid_constant__ Batch<SgdStep> batch) {
  size_t first_block;
  const Stepped& tensor = tensor_of_block(batch.tensors, first_block);
  if (tensor.arrays[1]) take_block<2>(batch, tensor, first_block);
  else take_block<1>(batch, tensor, first_block);
}
