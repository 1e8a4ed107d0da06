// replay.cu -- the optimizers' steps, those of a trainer as well as those that a replica repeats from its log.
//
// The recipes are those of src/cpu/adamw.rs and src/cpu/sgd.rs, bit for bit: each operation is one correctly rounded
// intrinsic, which nvcc neither fuses nor approximates (a build with -use_fast_math would flush subnormals: there is
// none). Several steps take one pass over the memory. Caller owns all of it.
//
// Example: AdamW, p 4, m and v 0, gradient 2, numbers decay 0.75, one_minus_beta1 0.5, one_minus_beta2 0.25, beta2 0.75,
// step_size 1, bias_correction2_sqrt 0.5, eps 0: m = fma(0.5, 2 - 0, 0) = 1, v = fma(0.25 * 2, 2, 0 * 0.75) = 1,
// p = 4 * 0.75 - (1 * 1) / (1 / 0.5 + 0) = 2.5.
// SGD, p 4, buffer 6, gradient 2, numbers decay 0.25, momentum 0.5, one_minus_dampening 1, lr 0.5: g = fma(4, 0.25, 2) = 3,
// buffer = fma(3, 1, 6 * 0.5) = 6, p = fma(6, -0.5, 4) = 1.
#include "common.cuh"

template <typename Step>
__device__ inline float scaled(const Step& step, float g) {
  const bool plain = step.loss_scale == 1.0f && step.factor == 1.0f;
  return plain ? g : __fmul_rn(__fdiv_rn(g, step.loss_scale), step.factor);
}

// One element. `in_tail`: among the last ones, which torch's CPU loops treat in another way.
__device__ inline void take_step(const AdamWStep& step, float g, bool in_tail, float (&state)[3]) {
  float &p = state[0], &m = state[1], &v = state[2];
  g = scaled(step, g);
  const float square_of_g = __fmul_rn(g, g);
  if (step.arithmetic == kTorchCudaFused) {
    if (__float_as_uint(step.decay) != 0) p = __fmaf_rn(p, step.decay, p);
    const float beta1 = step.one_minus_beta1;  // under this arithmetic
    m = __fmaf_rn(m, beta1, __fmaf_rn(g, -beta1, g));
    v = __fmaf_rn(v, step.beta2, __fmaf_rn(square_of_g, -step.beta2, square_of_g));
  } else {
    p = __fmul_rn(p, step.decay);
    const bool near = step.one_minus_beta1 < 0.5f;  // the end to start from: m, or g
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

// All steps of the elements first..first + kCount.
template <int kCount, int kArrays, typename Step>
__device__ inline void take_steps(float* const (&arrays)[kArrays], const Steps<Step>& steps, size_t num_steps, bool in_tail,
                                  size_t first) {
  using Floats = Pack<float, kCount>;
  float state[kCount][kArrays];
  for (int a = 0; a < kArrays; ++a) {
    const Floats here = *reinterpret_cast<const Floats*>(arrays[a] + first);
    for (int i = 0; i < kCount; ++i) state[i][a] = here.at[i];
  }
  for (size_t s = 0; s < num_steps; ++s) {
    const Step& step = steps.at[s];
    float g[kCount] = {};
    if (step.kind == kFloat32) load_gradient<float, kCount>(step.gradient, first, g);
    if (step.kind == kBfloat16) load_gradient<Bf16, kCount>(step.gradient, first, g);
    for (int i = 0; i < kCount; ++i) take_step(step, g[i], in_tail, state[i]);
  }
  for (int a = 0; a < kArrays; ++a) {
    Floats here;
    for (int i = 0; i < kCount; ++i) here.at[i] = state[i][a];
    *reinterpret_cast<Floats*>(arrays[a] + first) = here;
  }
}

// Launch: 1-D grid of any size. A pack lies in torch's tail or before it, since a tail begins at a multiple of 8.
template <int kCount, int kArrays, typename Step>
__device__ void take_all(float* const (&arrays)[kArrays],  // each [num_elements]  device, in place; aligned to kCount elements
                         const Steps<Step>& steps, size_t num_elements, size_t num_steps) {
  const size_t num_packs = num_elements / kCount, tail = num_elements - num_elements % kTorchLanes;
  for (size_t i = global_thread(); i < num_packs; i += num_threads())
    take_steps<kCount>(arrays, steps, num_steps, i * kCount >= tail, i * kCount);
  for (size_t i = num_packs * kCount + global_thread(); i < num_elements; i += num_threads())
    take_steps<1>(arrays, steps, num_steps, i >= tail, i);
}
template <int kCount>
__device__ void sgd(float* p, float* buffer, size_t num_elements, size_t has_buffer, size_t num_steps,
                    const Steps<SgdStep>& steps) {
  float *with_buffer[] = {p, buffer}, *alone[] = {p};
  if (has_buffer) take_all<kCount>(with_buffer, steps, num_elements, num_steps);
  else take_all<kCount>(alone, steps, num_elements, num_steps);
}

extern "C" __global__ void adamw_4(float* p, float* m, float* v, size_t num_elements, size_t num_steps,
                                   const __grid_constant__ Steps<AdamWStep> steps) {
  float* arrays[] = {p, m, v};
  take_all<4>(arrays, steps, num_elements, num_steps);
}
extern "C" __global__ void adamw_1(float* p, float* m, float* v, size_t num_elements, size_t num_steps,
                                   const __grid_constant__ Steps<AdamWStep> steps) {
  float* arrays[] = {p, m, v};
  take_all<1>(arrays, steps, num_elements, num_steps);
}
// The buffer is not touched, and may be null, where there is none; then no step has momentum.
extern "C" __global__ void sgd_4(float* p, float* buffer, size_t num_elements, size_t has_buffer, size_t num_steps,
                                 const __grid_constant__ Steps<SgdStep> steps) {
  sgd<4>(p, buffer, num_elements, has_buffer, num_steps, steps);
}
extern "C" __global__ void sgd_1(float* p, float* buffer, size_t num_elements, size_t has_buffer, size_t num_steps,
                                 const __grid_constant__ Steps<SgdStep> steps) {
  sgd<1>(p, buffer, num_elements, has_buffer, num_steps, steps);
}
