//! The extension module `evermoe._native`: converts, releases the GIL, calls. No decisions.

mod capture;
#[cfg(feature = "cuda")]
mod chunks;
mod durable;
mod engine;
mod error;
mod mesh;
#[cfg(feature = "cuda")]
mod nccl;
mod ops;
mod planning;
mod protocol;
mod reachability;
mod replay;
mod secret;
mod simulate;
mod snapshot;
#[cfg(feature = "object-store")]
mod store;
mod transport;

use crate::error::{Error, Result};
use pyo3::prelude::*;
use std::time::Duration;

/// Converts seconds, as Python passes them.
fn duration(seconds: f64) -> Result<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|error| Error::invalid(format!("seconds: {error}, got {seconds}")))
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    // NumPy's C interface is looked up by Python code at its first use, which would panic if a signal arrives
    // meanwhile.
    module.py().import("numpy")?;
    numpy::dtype::<u8>(module.py());
    capture::register(module)?;
    #[cfg(feature = "cuda")]
    chunks::register(module)?;
    durable::register(module)?;
    engine::register(module)?;
    mesh::register(module)?;
    #[cfg(feature = "cuda")]
    nccl::register(module)?;
    ops::register(module)?;
    planning::register(module)?;
    protocol::register(module)?;
    reachability::register(module)?;
    replay::register(module)?;
    secret::register(module)?;
    simulate::register(module)?;
    snapshot::register(module)?;
    #[cfg(feature = "object-store")]
    store::register(module)?;
    transport::register(module)
}
