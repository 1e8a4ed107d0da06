//! The arithmetic of the torch ops on plain slices: the CPU backend, and the reference for the CUDA kernels.
//!
//! | file | content |
//! |---|---|
//! | `histogram` | tokens per expert |
//! | `plan` | the row of the send buffer for each slot of the routing: a stable counting sort |
//! | `rows` | copies rows into the order of the plan, and combines them back |
//! | `exchange` | regroups rows from other ranks by expert, and back |
//! | `adamw`, `sgd` | an optimizer's step, with the same bits everywhere |
//! | `steps` | shared parts of the optimizers: gradients, arithmetics, several steps in one pass |
//! | `float_mode` | the processor's float mode while they run |
//! | `chunk_layout` | layout of the bytes of many tensors in a stream of chunks |
//! | `chunks` | tensors to chunks and back, hashed on the way |
//! | `fp8` | rows in 8 bits with a scale per 128 columns, and back |
//! | `float` | conversion of float32, bfloat16 and float16 to float32 and back |
//! | `buffers` | memory of large results, kept mapped from step to step |
//! | `memory` | prefetching of rows, and stores around the cache |
//! | `vector` | loops for the processor's vector instructions |
//! | `parallel` | the parallel loop that the caller provides: torch's pool in ops, a plain loop in tests |
//!
//! Vocabulary: `T` tokens choose `K` experts each; `slot = t * K + k` is one choice; a *row* is one line of the send
//! buffer; -1 means "no expert" in `ids`, "no slot" in `row_ids`, "no row" in `positions`.
//!
//! No result depends on the number of threads: integers are exact, and every float is computed by one thread
//! in a fixed order.

mod adamw;
mod buffers;
mod chunk_layout;
mod chunks;
mod exchange;
mod float;
mod float_mode;
mod fp8;
mod histogram;
pub(crate) mod memory;
mod parallel;
mod plan;
mod rows;
mod sgd;
mod steps;
mod vector;

pub use adamw::{AdamWOptions, AdamWStep, adamw};
pub use buffers::{Buffer, Buffers, MIN_BYTES};
pub use chunk_layout::{BLOCK_BYTES, ChunkLayout, Piece};
pub use chunks::{MAX_SHORT_BYTES, chunk_checksum, hash_blocks, pack_chunks, unpack_chunks};
pub use exchange::regroup;
pub use float::Float;
pub use fp8::{FP8_COLUMNS, dequantize_rows, fp8_row_bytes, quantize_rows};
pub use histogram::{Id, histogram};
pub(crate) use parallel::Disjoint;
pub use parallel::{Parallel, Serial};
pub use plan::{dispatch_plan, invert_positions};
pub use rows::{Backward, Combine, DOT_PARTIALS, permute, unpermute, unpermute_backward};
pub(crate) use sgd::check_no_momentum;
pub use sgd::{SgdOptions, SgdStep, sgd};
pub use steps::{Arithmetic, Gradient, Rounded, TORCH_LANES};
