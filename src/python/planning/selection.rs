//! Python bindings of [`crate::selection`].

use super::{Matrix, numbers, shape_error, to_matrix};
use crate::selection;
use numpy::{PyArray1, PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::prelude::*;

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(select_sequential, module)?)?;
    module.add_function(wrap_pyfunction!(select_load_aware, module)?)?;
    module.add_function(wrap_pyfunction!(select_by_budget, module)?)?;
    module.add_function(wrap_pyfunction!(shard_modules, module)?)?;
    module.add_function(wrap_pyfunction!(place_owners, module)?)?;
    module.add_class::<TokenLedger>()
}

#[pyfunction]
fn select_sequential(
    layers: usize,
    experts: usize,
    experts_per_layer: usize,
    checkpoint: u64,
) -> PyResult<selection::Selection> {
    Ok(selection::sequential(layers, experts, experts_per_layer, checkpoint)?)
}

#[pyfunction]
#[pyo3(signature = (tokens, waiting, ranks, experts_per_layer, checkpoint))]
fn select_load_aware(
    py: Python<'_>,
    tokens: PyReadonlyArray2<'_, i64>,
    waiting: Option<PyReadonlyArray2<'_, i64>>,
    ranks: Option<PyReadonlyArray2<'_, i64>>,
    experts_per_layer: usize,
    checkpoint: u64,
) -> PyResult<selection::Selection> {
    let shape = shape(&tokens);
    for (name, matrix) in [("waiting", &waiting), ("rank_LE", &ranks)] {
        matrix.as_ref().map_or(Ok(()), |matrix| check_shape(name, matrix, shape))?;
    }
    let tokens = numbers(&tokens);
    let (waiting, ranks) = (waiting.as_ref().map(numbers), ranks.as_ref().map(numbers));
    let (waiting, ranks) = (waiting.as_deref(), ranks.as_deref());
    Ok(py.detach(|| selection::load_aware(&tokens, waiting, ranks, shape, experts_per_layer, checkpoint))?)
}

#[pyfunction]
fn select_by_budget(
    py: Python<'_>,
    tokens: PyReadonlyArray2<'_, i64>,
    capacity: u64,
) -> PyResult<selection::Selection> {
    let shape = shape(&tokens);
    let tokens = numbers(&tokens);
    Ok(py.detach(|| selection::budget(&tokens, shape, capacity))?)
}

#[pyfunction]
fn shard_modules(
    py: Python<'_>,
    nbytes: Vec<u64>,
    expert_bytes: Vec<u64>,
    alignment: u64,
) -> PyResult<Vec<Vec<(usize, u64, u64)>>> {
    let parts = py.detach(|| selection::shard_modules(&nbytes, &expert_bytes, alignment))?;
    let row = |part: selection::ModuleShard| (part.module, part.bytes.start, part.bytes.end);
    Ok(parts.into_iter().map(|parts| parts.into_iter().map(row).collect()).collect())
}

#[pyfunction]
fn place_owners(
    py: Python<'_>,
    nbytes: Vec<u64>,
    active: Vec<Vec<usize>>,
    copies: Vec<Vec<usize>>,
    loads: Vec<u64>,
) -> PyResult<Vec<usize>> {
    Ok(py.detach(|| selection::place_owners(&nbytes, &active, &copies, &loads))?)
}

fn shape(array: &PyReadonlyArray2<'_, i64>) -> [usize; 2] {
    [array.shape()[0], array.shape()[1]]
}

fn check_shape(argument: &str, array: &PyReadonlyArray2<'_, i64>, expected: [usize; 2]) -> PyResult<()> {
    let found = shape(array);
    if found == expected {
        return Ok(());
    }
    Err(shape_error(format!("{argument}: expected shape {expected:?} (layers, experts), got {found:?}")))
}

/// See [`selection::TokenLedger`].
#[pyclass(module = "evermoe._native")]
pub(in crate::python) struct TokenLedger(pub(in crate::python) selection::TokenLedger);

#[pymethods]
impl TokenLedger {
    #[new]
    fn new(
        layers: usize,
        experts: usize,
        experts_per_layer: usize,
        max_lost_token_fraction: f64,
    ) -> PyResult<Self> {
        Ok(Self(selection::TokenLedger::new(layers, experts, experts_per_layer, max_lost_token_fraction)?))
    }

    #[staticmethod]
    fn from_json(text: &str) -> PyResult<Self> {
        Ok(Self(selection::TokenLedger::from_json(text)?))
    }

    fn to_json(&self) -> String {
        self.0.to_json()
    }

    fn add(&mut self, counts: PyReadonlyArray2<'_, i64>) -> PyResult<()> {
        check_shape("counts", &counts, self.0.shape())?;
        Ok(self.0.add(&numbers(&counts))?)
    }

    #[pyo3(signature = (selection, newer=None))]
    fn copied(
        &mut self,
        selection: Vec<Vec<usize>>,
        newer: Option<PyReadonlyArray2<'_, i64>>,
    ) -> PyResult<()> {
        let Some(newer) = newer else { return Ok(self.0.copied(&selection)?) };
        check_shape("newer", &newer, self.0.shape())?;
        Ok(self.0.copied_without(&selection, &numbers(&newer))?)
    }

    fn restore(
        &mut self,
        seen: PyReadonlyArray2<'_, i64>,
        lost: PyReadonlyArray2<'_, i64>,
        at_risk: PyReadonlyArray2<'_, i64>,
        experts_per_layer: usize,
    ) -> PyResult<()> {
        for (name, counts) in [("seen", &seen), ("lost", &lost), ("at_risk", &at_risk)] {
            check_shape(name, counts, self.0.shape())?;
        }
        let [seen, lost, at_risk] = [numbers(&seen), numbers(&lost), numbers(&at_risk)];
        Ok(self.0.restore([&seen, &lost, &at_risk], experts_per_layer)?)
    }

    fn lose(&mut self, experts: Vec<Vec<usize>>) -> PyResult<f64> {
        Ok(self.0.lose(&experts, None)?)
    }

    fn adapt_k(&mut self) {
        self.0.adapt_k();
    }

    fn portions<'py>(
        &self,
        py: Python<'py>,
        part: PyReadonlyArray2<'py, i64>,
    ) -> PyResult<Bound<'py, PyArray1<f64>>> {
        check_shape("part", &part, self.0.shape())?;
        Ok(PyArray1::from_vec(py, self.0.portions(&numbers(&part))))
    }

    #[getter]
    fn step(&self) -> u64 {
        self.0.step()
    }

    #[getter]
    fn checkpoint(&self) -> u64 {
        self.0.checkpoint()
    }

    #[getter]
    fn experts_per_layer(&self) -> usize {
        self.0.experts_per_layer()
    }

    #[getter]
    fn seen<'py>(&self, py: Python<'py>) -> PyResult<Matrix<'py>> {
        to_matrix(py, self.0.seen().to_vec(), self.0.shape())
    }

    #[getter]
    fn at_risk<'py>(&self, py: Python<'py>) -> PyResult<Matrix<'py>> {
        to_matrix(py, self.0.at_risk().to_vec(), self.0.shape())
    }

    #[getter]
    fn lost<'py>(&self, py: Python<'py>) -> PyResult<Matrix<'py>> {
        to_matrix(py, self.0.lost().to_vec(), self.0.shape())
    }

    #[getter]
    fn waiting<'py>(&self, py: Python<'py>) -> PyResult<Matrix<'py>> {
        to_matrix(py, self.0.waiting().to_vec(), self.0.shape())
    }

    #[getter]
    fn plt_at_risk<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        PyArray1::from_vec(py, self.0.plt_at_risk())
    }

    #[getter]
    fn plt_lost<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        PyArray1::from_vec(py, self.0.plt_lost())
    }

    #[getter]
    fn plt(&self) -> f64 {
        self.0.plt()
    }
}
