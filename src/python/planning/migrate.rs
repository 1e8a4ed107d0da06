//! Python bindings of [`crate::placement::migrate`].

use super::{Matrix, numbers, shape_error, to_matrix};
use crate::placement;
use numpy::{PyReadonlyArray1, PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::prelude::*;

/// `node_map`, (expert, source, destination, bytes) of the transfers, and the total bytes.
type Migration = (Vec<usize>, Vec<(usize, usize, usize, i64)>, i128);

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(migrate, module)?)?;
    module.add_function(wrap_pyfunction!(keep_in_place, module)?)
}

#[pyfunction]
fn keep_in_place<'py>(
    py: Python<'py>,
    held: PyReadonlyArray2<'_, i64>,
    placement: PyReadonlyArray2<'_, i64>,
    nbytes: PyReadonlyArray1<'_, i64>,
    domains: Vec<Vec<usize>>,
) -> PyResult<Matrix<'py>> {
    let nbytes: Vec<i64> = nbytes.as_array().iter().copied().collect();
    let shape = [placement.shape()[0], placement.shape()[1]];
    if held.shape() != shape || shape[1] != nbytes.len() {
        return Err(shape_error(format!(
            "held: expected shape {shape:?}, as of placement, with a column for each expert of nbytes, got {:?}",
            held.shape()
        )));
    }
    let (held, placement) = (numbers(&held), numbers(&placement));
    let kept = py.detach(|| placement::keep_in_place(&held, &placement, &nbytes, &domains))?;
    to_matrix(py, kept, shape)
}

#[pyfunction]
#[pyo3(signature = (old, new, nbytes, domains))]
fn migrate(
    py: Python<'_>,
    old: PyReadonlyArray2<'_, i64>,
    new: PyReadonlyArray2<'_, i64>,
    nbytes: PyReadonlyArray1<'_, i64>,
    domains: Option<Vec<Vec<usize>>>,
) -> PyResult<Migration> {
    let nbytes: Vec<i64> = nbytes.as_array().iter().copied().collect();
    for (name, shape) in [("old", old.shape()), ("new", new.shape())] {
        if shape[1] != nbytes.len() {
            return Err(shape_error(format!(
                "{name}: expected {} columns, one for each expert of nbytes, got shape {shape:?}",
                nbytes.len()
            )));
        }
    }
    let (old, new) = (numbers(&old), numbers(&new));
    let migration = py.detach(|| placement::migrate(&old, &new, &nbytes, domains.as_deref()))?;
    let row = |transfer: placement::ExpertTransfer| {
        (transfer.expert, transfer.source, transfer.destination, transfer.nbytes)
    };
    Ok((migration.node_map, migration.transfers.into_iter().map(row).collect(), migration.nbytes))
}
