//! evermoe: train Mixture-of-Experts models on machines that fail.
//!
//! ```text
//! training:  tokens ─ dispatch ─ experts ─ combine ─ loss ─ backward ─ reduce ─ vote ─ update ─ copy ─┐
//! failure:   agree on the members ─ survey what survives ─ plan ─ fetch ─ verify ─ resume  ◄───────────┘
//! ```
//!
//! | module | what |
//! |---|---|
//! | [`error`] | the one public error type, by what the caller can do |
//! | [`secret`] | pure: tags by which members of a job know each other |
//! | [`random`] | pure: reproducible random numbers |
//! | [`dispatch`] | pure: counts and replicas → which rank sends which tokens where |
//! | [`placement`] | pure: load → replicas → which rank holds which expert; the holders of copies |
//! | [`persist`] | pure: which version is written, persisted and recovered from; which durable versions stay |
//! | [`protection`] | pure: units, nodes and idle windows → how each unit is protected, on which nodes |
//! | [`protocol`] | pure: the commit protocol of one member as a state machine: events in, commands out |
//! | [`recovery`] | pure: what survives → target version and transfers |
//! | [`schedule`] | pure: spans of a profile → idle windows → which chunk goes in which |
//! | [`selection`] | pure: tokens at risk → which experts to copy now; which rank saves which part of the rest |
//! | [`simulate`] | pure: a job on a cluster that fails, run by the planners and the protocol in simulated time |
//! | [`beside`] | threads beside training, which give way to its own |
//! | [`reach`] | whether members can be reached: a port of each that answers, and who asks |
//! | [`transport`] | messages between members beside their collectives: from memory to memory, in threads of their own |
//! | [`snapshot`] | arenas in named shared memory that outlive a crash of the process; the thread that captures into them |
//! | [`durable`] | files that are on disk when the call returns: past the page cache, by several threads |
//! | `store` | objects in S3, GCS, Azure and behind HTTP: create-only writes, parts, retries |
//! | [`replay`] | pure: a step as a record, and the log of records that a replica repeats |
//! | [`cpu`] | the torch ops' arithmetic on slices: the CPU backend and the oracle of the kernels |
//! | `cuda` | the kernels of `kernels/` through the driver API, loaded at run time |
//! | [`torch`] | the stable C ABI of libtorch and the ops registered through it |
//! | `python` | the extension module: convert, release the GIL, call; no decisions |
//!
//! Imports point one way: `error ← planners, reach and cpu ← replay, snapshot, cuda, torch ← python`; of the planners `placement`
//! uses `dispatch`, `schedule` uses `placement`, and `protection` uses both of these.

pub mod beside;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod dispatch;
pub mod durable;
pub mod error;
pub mod persist;
pub mod placement;
pub mod protection;
pub mod protocol;
#[cfg(feature = "python")]
mod python;
pub mod random;
pub mod reach;
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
