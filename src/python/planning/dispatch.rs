//! [`crate::dispatch`] for Python.

use super::{Matrix, numbers, shape_error, to_matrix};
use crate::dispatch::{self, Policy};
use numpy::{PyReadonlyArray1, PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::prelude::*;

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(imbalance, module)?)?;
    module.add_function(wrap_pyfunction!(split_tokens, module)?)
}

fn to_policy(name: &str) -> PyResult<Policy> {
    match name {
        "even" => Ok(Policy::Even),
        "balanced" => Ok(Policy::Balanced),
        _ => Err(shape_error(format!("policy: expected \"even\" or \"balanced\", got {name:?}"))),
    }
}

#[pyfunction]
fn imbalance(
    py: Python<'_>,
    matrix: PyReadonlyArray2<'_, i64>,
    load: PyReadonlyArray1<'_, f64>,
    policy: &str,
) -> PyResult<f64> {
    let policy = to_policy(policy)?;
    let [nodes, experts] = [matrix.shape()[0], matrix.shape()[1]];
    let load: Vec<f64> = load.as_array().iter().copied().collect();
    if load.len() != experts {
        return Err(shape_error(format!(
            "load: expected {experts} numbers as matrix is [{nodes}, {experts}] (nodes, experts), got {}",
            load.len()
        )));
    }
    let matrix = numbers(&matrix);
    Ok(py.detach(|| dispatch::imbalance(&matrix, &load, nodes, policy))?)
}

#[pyfunction]
fn split_tokens<'py>(
    py: Python<'py>,
    tokens: PyReadonlyArray2<'py, i64>,
    matrix: PyReadonlyArray2<'py, i64>,
    rank: usize,
    policy: &str,
) -> PyResult<(Matrix<'py>, Matrix<'py>)> {
    let policy = to_policy(policy)?;
    let [experts, ranks] = [tokens.shape()[0], tokens.shape()[1]];
    if matrix.shape() != [ranks, experts] {
        let [rows, columns] = [matrix.shape()[0], matrix.shape()[1]];
        return Err(shape_error(format!(
            "matrix: expected shape [{ranks}, {experts}] (ranks, experts) as tokens is [{experts}, {ranks}], got \
             [{rows}, {columns}]"
        )));
    }
    let (tokens, matrix) = (numbers(&tokens), numbers(&matrix));
    let split = py.detach(|| dispatch::split_tokens(&tokens, &matrix, experts, ranks, rank, policy))?;
    Ok((to_matrix(py, split.send, [experts, ranks])?, to_matrix(py, split.receive, [ranks, experts])?))
}
