//! The kernels of `kernels/` through the CUDA driver API, which is loaded at run time.
//!
//! Knows nothing of torch: a [`Launcher`] is a device and somebody's stream, and its methods take device addresses
//! and sizes. Every launch is checked here first; nothing waits for the device.

mod device;
mod launch;
mod optim;

pub use device::Launcher;
pub use launch::{Backward, Combine, FloatType, Permute, Plan};
pub use optim::{AdamW, GradientAt, Sgd};

/// Whether this build holds compiled kernels (`build.rs` found an nvcc).
pub fn has_kernels() -> bool {
    cfg!(cuda_kernels)
}
