//! [`crate::dispatch`] for Python.

use super::{Matrix, numbers, shape_error, to_matrix};
use crate::dispatch;
use numpy::{PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::prelude::*;

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(split_tokens, module)?)
}

#[pyfunction]
fn split_tokens<'py>(
    py: Python<'py>,
    tokens: PyReadonlyArray2<'py, i64>,
    matrix: PyReadonlyArray2<'py, i64>,
    rank: usize,
) -> PyResult<(Matrix<'py>, Matrix<'py>)> {
    let [experts, ranks] = [tokens.shape()[0], tokens.shape()[1]];
    if matrix.shape() != [ranks, experts] {
        let [rows, columns] = [matrix.shape()[0], matrix.shape()[1]];
        return Err(shape_error(format!(
            "matrix: expected shape [{ranks}, {experts}] (ranks, experts) as tokens is [{experts}, {ranks}], got \
             [{rows}, {columns}]"
        )));
    }
    let split = dispatch::split_tokens(&numbers(&tokens), &numbers(&matrix), experts, ranks, rank)?;
    Ok((to_matrix(py, split.send, [experts, ranks])?, to_matrix(py, split.receive, [ranks, experts])?))
}
