//! Python bindings of [`crate::dispatch`].

use super::{Matrix, numbers, shape_error, to_matrix};
use crate::dispatch::{self, Policy};
use numpy::{PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::prelude::*;

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(imbalance, module)?)?;
    module.add_function(wrap_pyfunction!(split_tokens, module)?)?;
    module.add_class::<LoadAverage>()
}

#[pyfunction]
fn imbalance(
    py: Python<'_>,
    matrix: PyReadonlyArray2<'_, i64>,
    load: PyReadonlyArray1<'_, f64>,
    policy: &str,
) -> PyResult<f64> {
    let policy: Policy = policy.parse()?;
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
    let policy: Policy = policy.parse()?;
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

type Floats<'py> = Bound<'py, PyArray2<f64>>;

/// See [`dispatch::LoadAverage`].
#[pyclass(module = "evermoe._native")]
struct LoadAverage(dispatch::LoadAverage);

#[pymethods]
impl LoadAverage {
    #[new]
    #[pyo3(signature = (layers, experts, half_life, state))]
    fn new(
        layers: usize,
        experts: usize,
        half_life: f64,
        state: Option<PyReadonlyArray2<'_, f64>>,
    ) -> PyResult<Self> {
        let Some(state) = state else {
            return Ok(Self(dispatch::LoadAverage::new(layers, experts, half_life)?));
        };
        if experts.checked_add(1).is_none_or(|row| state.shape() != [layers, row]) {
            return Err(shape_error(format!(
                "state: expected shape [{layers}, {experts} + 1] (layers, experts and the steps), got {:?}",
                state.shape()
            )));
        }
        let state: Vec<f64> = state.as_array().iter().copied().collect();
        Ok(Self(dispatch::LoadAverage::from_state(layers, experts, half_life, &state)?))
    }

    fn add(&mut self, tokens: PyReadonlyArray2<'_, i64>) -> PyResult<()> {
        let expected = self.0.shape();
        if tokens.shape() != expected {
            return Err(shape_error(format!(
                "tokens: expected shape {expected:?} (layers, experts), got {:?}",
                tokens.shape()
            )));
        }
        Ok(self.0.add(&numbers(&tokens))?)
    }

    #[getter]
    fn loads<'py>(&self, py: Python<'py>) -> PyResult<Floats<'py>> {
        PyArray1::from_vec(py, self.0.loads()).reshape(self.0.shape())
    }

    #[getter]
    fn state<'py>(&self, py: Python<'py>) -> PyResult<Floats<'py>> {
        let [layers, experts] = self.0.shape();
        PyArray1::from_slice(py, self.0.state()).reshape([layers, experts + 1])
    }
}
