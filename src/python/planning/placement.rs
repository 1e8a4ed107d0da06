//! [`crate::placement`] for Python: replicas and where they go.

use super::{Matrix, numbers, shape_error, to_matrix};
use crate::placement;
use numpy::{PyArray1, PyReadonlyArray1, PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::prelude::*;

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(allocate, module)?)?;
    module.add_function(wrap_pyfunction!(place, module)?)
}

#[pyfunction]
fn allocate<'py>(
    py: Python<'py>,
    load: PyReadonlyArray1<'py, f64>,
    ranks: usize,
    slots: usize,
    min_replicas: usize,
) -> PyResult<Bound<'py, PyArray1<i64>>> {
    let load: Vec<f64> = load.as_array().iter().copied().collect();
    Ok(PyArray1::from_vec(py, placement::allocate(&load, ranks, slots, min_replicas)?))
}

#[pyfunction]
#[pyo3(signature = (replicas, ranks, slots, previous=None))]
fn place<'py>(
    py: Python<'py>,
    replicas: PyReadonlyArray1<'py, i64>,
    ranks: usize,
    slots: usize,
    previous: Option<PyReadonlyArray2<'py, i64>>,
) -> PyResult<Matrix<'py>> {
    let replicas: Vec<i64> = replicas.as_array().iter().copied().collect();
    if let Some(shape) =
        previous.as_ref().map(|previous| previous.shape()).filter(|shape| shape[1] != replicas.len())
    {
        return Err(shape_error(format!(
            "previous: expected shape [{ranks}, {}] (ranks, experts), got {shape:?}",
            replicas.len()
        )));
    }
    let previous = previous.as_ref().map(numbers);
    let placed = py.detach(|| placement::place(&replicas, ranks, slots, previous.as_deref()))?;
    to_matrix(py, placed, [ranks, replicas.len()])
}
