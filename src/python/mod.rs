//! The extension module `evermoe._native`: converts, releases the GIL, calls. No decisions.

mod capture;
#[cfg(feature = "cuda")]
mod chunks;
mod error;
mod ops;
mod persist;
mod planning;
mod protocol;
mod reach;
mod replay;
mod snapshot;

use pyo3::prelude::*;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    capture::register(module)?;
    #[cfg(feature = "cuda")]
    chunks::register(module)?;
    ops::register(module)?;
    persist::register(module)?;
    planning::register(module)?;
    protocol::register(module)?;
    reach::register(module)?;
    replay::register(module)?;
    snapshot::register(module)
}
