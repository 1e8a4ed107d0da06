//! The stable C ABI of libtorch, found in the running process, and the ops registered through it.
//!
//! Nothing is linked: `import torch` has loaded libtorch, and [`register_ops`] looks up its C functions by name. So one
//! binary works with every torch from 2.10 on, and the crate builds without torch.
//!
//! | file | content |
//! |---|---|
//! | `ffi` | the table of C functions |
//! | `tensor` | `Tensor`: owned handles, shapes, checked slices |
//! | `kernel` | arguments and results of kernels; errors and panics become Python's `RuntimeError` |
//! | `library` | registration with torch's dispatcher, and torch's thread pool |
//! | `checks` | checks of arguments, and the choice of device and element types |
//! | `ops` | the ops: schemas, and those that dispatch rows |
//! | `histogram` | the ops that count tokens per expert |
//! | `exchange` | the ops for the exchange between ranks: the split of tokens, and the regrouping of rows |
//! | `fp8` | the ops between rows and their 8-bit form |
//! | `chunks` | the ops between tensors and chunks |
//! | `optim` | the optimizers' ops |
//! | `stepped` | a parameter with its steps, between `optim` and `on_cuda` |
//! | `on_cuda` | the conversion of tensors for the launchers of `cuda` |

mod checks;
mod chunks;
mod exchange;
mod ffi;
mod fp8;
mod histogram;
mod kernel;
mod library;
#[cfg(feature = "cuda")]
mod on_cuda;
mod ops;
mod optim;
mod stepped;
mod tensor;

#[cfg(feature = "python")]
pub(crate) use library::TorchPool;
pub use ops::{cpu_cache_bytes, register_ops, set_cpu_cache_limit};
