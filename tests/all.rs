//! Tests that need no process of their own, as one program: as many programs as files take minutes more to build.

mod adamw;
mod arena;
mod balanced;
mod chunks;
mod common;
mod copy_engine;
mod dispatch;
mod dominance;
mod durable;
mod holders;
mod layering;
mod migrate;
mod placement;
mod protection;
mod protocol;
mod protocol_message;
mod recovery;
mod recovery_lagging;
mod replay_log;
mod schedule;
mod selection;
mod sgd;
mod simulate;
mod survival;
mod triple_buffer;
