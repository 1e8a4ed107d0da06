//! Python bindings of the planners: numpy arrays and names in, numpy arrays and names out. One file per planner module.

mod dispatch;
mod holders;
mod migrate;
mod placement;
mod presets;
mod protection;
mod recovery;
mod schedule;
mod selection;
mod survival;

pub(super) use selection::TokenLedger;

use crate::error::Error;
use numpy::{PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::prelude::*;

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    dispatch::register(module)?;
    holders::register(module)?;
    migrate::register(module)?;
    placement::register(module)?;
    presets::register(module)?;
    protection::register(module)?;
    recovery::register(module)?;
    schedule::register(module)?;
    selection::register(module)?;
    survival::register(module)
}

type Matrix<'py> = Bound<'py, PyArray2<i64>>;

/// The numbers of an array in C order, without a copy if it is stored so.
fn numbers<'a>(array: &'a PyReadonlyArray2<'_, i64>) -> std::borrow::Cow<'a, [i64]> {
    match array.as_slice() {
        Ok(numbers) if array.is_c_contiguous() => numbers.into(),
        _ => array.as_array().iter().copied().collect::<Vec<_>>().into(),
    }
}

fn to_matrix(py: Python<'_>, numbers: Vec<i64>, shape: [usize; 2]) -> PyResult<Matrix<'_>> {
    PyArray1::from_vec(py, numbers).reshape(shape)
}

fn shape_error(what: String) -> PyErr {
    Error::invalid(what).into()
}
