//! Train Mixture-of-Experts models on machines that fail: the planners, the arithmetic and the storage behind it.
//!
//! The Python package `evermoe` is a face of this crate, and the crate is a library of its own. It needs neither Python nor a
//! GPU nor libtorch to build or to run. Use it to
//!
//! - **plan**: place the replicas of experts, arrange copies of the state, fill idle network windows, recover, simulate a job;
//! - **dispatch**: count, order, move and combine tokens on the CPU, with the same bits as the CUDA kernels;
//! - **repeat** an optimizer's step elsewhere from its gradient, bit for bit;
//! - **store**: snapshots in shared memory, files past the page cache, objects in S3, GCS and Azure.
//!
//! # Example
//!
//! `cargo run --example plan_dispatch_replay --no-default-features`:
//!
//! ```
#![doc = include_str!("../examples/plan_dispatch_replay.rs")]
//! ```
//!
//! # Modules
//!
//! Planners are pure: plain data in, a plan and its typed reason out. They read no clock and no file, and draw no random numbers
//! but those of a seed. Every member of a job computes the same plan from the same data, so that no plan has to be sent.
//!
//! | planner | purpose |
//! |---|---|
//! | [`dispatch`] | counts of tokens and replicas → which rank sends how many tokens to whom |
//! | [`placement`] | load → replicas → which node holds which expert; holders of copies; probability of survival |
//! | [`protection`] | presets; units, nodes and idle windows → how each unit is protected, and on which nodes |
//! | [`schedule`] | spans of a profile → idle windows → which chunk travels in which window |
//! | [`selection`] | tokens at risk → which experts to copy now; which rank saves which part of the rest |
//! | [`recovery`] | what survives → target version and transfers |
//! | [`engine`] | what a preset does to a step: which copies are made, their versions, bytes and memory |
//! | [`protocol`] | the commit protocol of one member as a state machine: events in, commands out |
//! | [`replay`] | a step as a record, and the log of records that a replica repeats |
//! | [`simulate`] | a job on a cluster that fails, run by the planners and the protocol in simulated time |
//!
//! Executors do what a plan says.
//!
//! | executor | purpose |
//! |---|---|
//! | [`cpu`] | the ops on slices: the CPU backend, and the oracle of the CUDA kernels |
//! | `cuda` | the kernels of `kernels/` through the driver API, which is loaded at run time (feature `cuda`) |
//! | `nccl` | collectives among GPUs that can be aborted at any time, by the NCCL that torch has loaded (feature `cuda`) |
//! | [`torch`] | the ops, registered through libtorch's stable C ABI in a process that has loaded torch |
//! | [`snapshot`] | arenas in shared memory that outlive a crash of the process, and the thread that captures into them |
//! | [`durable`] | files that are on disk when the call returns, written around the page cache by several threads |
//! | `store` | objects in S3, GCS, Azure and behind HTTP (feature `object-store`) |
//! | [`reachability`] | probes by which members learn whether others can be reached |
//! | [`mesh`] | collectives and messages among members on the CPU, in the calling thread |
//! | [`transport`] | messages from memory to memory over TCP or UCX, outside the collectives |
//! | [`secret`] | tags by which the members of a job know each other |
//!
//! # Features
//!
//! | feature | adds |
//! |---|---|
//! | `cuda` (default) | `cuda`, `nccl`, and the kernels if the build finds an nvcc; no toolkit or driver is needed to build |
//! | `object-store` | `store` |
//! | `ucx` | messages by UCX, whose library is loaded at run time |
//! | `python` | the extension module `evermoe._native`, which maturin builds |
//!
//! # Errors
//!
//! Functions return [`Error`], whose variants say what the caller can do. A function panics only on slices whose lengths do not
//! match, and says so.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod background;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod dispatch;
pub mod durable;
pub mod engine;
mod error;
pub mod mesh;
#[cfg(feature = "cuda")]
pub mod nccl;
#[cfg(feature = "cuda")]
mod numa;
pub mod placement;
pub mod protection;
pub mod protocol;
#[cfg(feature = "python")]
mod python;
mod random;
pub mod reachability;
pub mod recovery;
pub mod replay;
pub mod schedule;
pub mod secret;
pub mod selection;
pub mod simulate;
pub mod snapshot;
#[cfg(feature = "object-store")]
pub mod store;
pub mod torch;
pub mod transport;

pub(crate) use error::ensure;
pub use error::{Error, Result};
