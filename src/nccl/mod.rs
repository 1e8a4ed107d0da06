//! Communicators of NCCL that can be aborted from any thread at any time: collectives among the GPUs of a job's members.
//!
//! torch's `ProcessGroupNCCL` aborts under locks that other threads hold while they connect, and after CUDA calls that wait for a
//! full launch queue. Here a communicator does not block (`ncclConfig_t.blocking = 0`): a call returns within microseconds,
//! and its caller asks until it is launched, or until the communicator is aborted. So an abort never waits for another thread
//! before NCCL has told its kernels to end, and no thread is inside NCCL when `ncclCommAbort` frees the communicator, as NCCL
//! requires (user guide, "Fault Tolerance").
//!
//! `ncclCommAbort` sets its flags first, which ends kernels and connections, and then waits: for the communicator's streams, for
//! CUDA graphs that contain its operations, for its threads. So each abort has a thread of its own, and nobody waits for it.
//!
//! Collectives run on the caller's stream. The library is torch's own, found at run time.

mod communicator;
mod library;

pub use communicator::{Communicator, wait_for_aborts};
pub use library::UniqueId;
