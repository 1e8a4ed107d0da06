// abi.h -- interface between the kernels and their launchers: constants, and the tables that a launch passes by value
// or that are in device memory. Its counterpart is src/cuda/abi.rs, whose tests compare the two with a C++ compiler.
//
// Tables consist of words of 8 bytes without gaps, so that all compilers use the same layout.
#pragma once
#include <cstddef>
#include <cstdint>

constexpr unsigned kWarp = 32;  // threads of a warp
constexpr int kInFlight = 4; // loads of each thread in flight

// ---- histogram.cu ---------------------------------------------------------------------------------
constexpr size_t kMaxLayers = 64;  // of one launch

struct LayerIds {
  const void* ids;     // [num_slots] int32_t or int64_t  device
  size_t num_slots;
  uint32_t end_block; // the layer's blocks end before it; they start at the end of the previous layer's
  uint32_t is_wide;    // whether ids are int64_t
};
struct LayersIds { LayerIds at[kMaxLayers]; };

// ---- rows.cu --------------------------------------------------------------------------------------
constexpr unsigned kCombiningThreads = 128;  // of a group that sums rows, at most: seven turns for a row of 7168 bfloat16

// ---- fp8.cu ---------------------------------------------------------------------------------------
constexpr size_t kFp8Columns = 128;  // that share a scale
constexpr int kFp8AtOnce = 2;        // parts of a row that a thread loads before it uses the first

// ---- exchange.cu: dynamic shared memory of split_tokens -------------------------------------------
constexpr size_t kHolderBytes = 32;  // of each rank, with a number of 4 bytes
constexpr size_t kClaimBytes = 16;   // of each source's part for each holder, and for itself

// ---- replay.cu ------------------------------------------------------------------------------------
constexpr int kMaxSteps = 8;       // rows of numbers of one launch
constexpr int kMaxTensors = 64;    // of one launch, a power of two; tables above 4 KiB need newer drivers
constexpr size_t kTorchLanes = 8;  // elements that torch's CPU loops take at once

enum GradientKind : uint8_t { kZero, kFloat32, kBfloat16 };
enum SteppedFlags : uint8_t { kInPacks = 1, kToFloat16 = 2 };
enum Arithmetic : uint32_t { kEvermoe, kTorchCpuFused, kTorchCudaFused, kTorchCudaForeach };

// The numbers of one step, computed by the trainer.
struct AdamWStep {
  static constexpr int kArrays = 3;  // p, m, v
  float loss_scale, factor, decay, one_minus_beta1, one_minus_beta2, beta2, step_size, bias_correction2_sqrt, eps;
  Arithmetic arithmetic;
};
struct SgdStep {
  static constexpr int kArrays = 2;  // p, buffer
  float loss_scale, factor, decay, momentum, one_minus_dampening, lr, is_first, nesterov, unused;
  Arithmetic arithmetic;
};
// A tensor with its state, and its steps: rows first_step..first_step + num_steps of the numbers, with one gradient
// each.
struct Stepped {
  float* arrays[3]; // [num_elements]  device, in place; null for a missing one
  void* rounded;    // [num_elements] Bf16 or Fp16  device, written: arrays[0] rounded; null for none
  size_t num_elements;
  uint32_t end_block; // the tensor's blocks end before it; they start at the end of the previous tensor's
  uint8_t first_step, num_steps, first_gradient;
  uint8_t flags;    // kInPacks: all of its memory can be read in packs; kToFloat16: the type of rounded
};
template <typename Step> struct Batch {
  Step steps[kMaxSteps];
  Stepped tensors[kMaxTensors]; // end_block of missing ones is the largest number
  const void* gradients[kMaxTensors]; // [num_elements] float or Bf16 each  device; unused where all are zero
  GradientKind kinds[kMaxTensors];    // of the gradients
};

// ---- copy.cu --------------------------------------------------------------------------------------
constexpr size_t kBlockBytes = 4096;    // of the stream, with one hash
constexpr unsigned kQuarters = 4;       // threads that share a block of bytes
constexpr unsigned kCopyThreads = 64; // of a block of threads: few warps, so that one chunk uses many multiprocessors
constexpr unsigned kDigestThreads = 256; // of a block that digests a unit

// Location of the bytes of a tensor.
struct Span {
  unsigned char* at;  // device, of any alignment
  uint64_t start;     // in the stream, a multiple of 16; spans are in its order and do not overlap
  uint64_t bytes;     // above 0
};
