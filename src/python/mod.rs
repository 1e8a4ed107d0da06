//! The extension module `evermoe._native`: converts, releases the GIL, calls. No decisions.

mod error;
mod ops;
mod planning;
mod snapshot;

use pyo3::prelude::*;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    ops::register(module)?;
    planning::register(module)?;
    snapshot::register(module)
}
