//! The extension module `evermoe._native`: converts, releases the GIL, calls. No decisions.

#[cfg(feature = "cuda")]
mod chunks;
mod engine;
mod error;
mod ops;
mod planning;
mod replay;
mod snapshot;
mod triple;

use pyo3::prelude::*;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    #[cfg(feature = "cuda")]
    chunks::register(module)?;
    engine::register(module)?;
    ops::register(module)?;
    planning::register(module)?;
    replay::register(module)?;
    snapshot::register(module)?;
    triple::register(module)
}
