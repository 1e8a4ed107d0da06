//! The kernels of `kernels/` through the CUDA driver API, which is loaded at run time.
//!
//! Independent of torch: a [`Launcher`] is a device and the caller's stream, and its methods take device addresses and
//! sizes. Every launch is checked first, and no call waits for the device unless its documentation says so.
//! [`ChunkCopier`] has its own streams, and page-locked host memory.

mod abi;
mod chunks;
mod copier;
mod device;
mod exchange;
mod fetch;
mod fp8;
mod histogram;
mod host_runs;
mod kernels;
mod launch;
mod marks;
mod optim;
mod pinned;
mod streams;
mod workspace;

pub use abi::Span;
pub use chunks::ChunkRange;
pub use copier::{ChunkCopier, HostMemory};
pub use device::Launcher;
#[cfg(feature = "python")]
pub(crate) use device::near;
pub use exchange::{Regroup, SplitTokens};
pub use fetch::Fetcher;
pub use fp8::Fp8Rows;
pub use histogram::LayerIds;
pub use launch::{Backward, Combine, FloatType, Permute, Plan};
pub use marks::{Mark, Marks};
pub use optim::{AdamW, GradientAt, RoundedAt, Sgd};
pub use pinned::PinnedBuffer;
pub use workspace::Staging;

/// Whether this build contains compiled kernels (`build.rs` found an nvcc).
pub fn has_kernels() -> bool {
    cfg!(cuda_kernels)
}
