//! Python face of the planners: numpy arrays and names in, numpy arrays and names out.

use crate::error::Error;
use crate::recovery::{Holding, Kind, Plan};
use crate::{dispatch, placement, recovery};
use numpy::{PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::prelude::*;
use std::collections::HashMap;

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(split_tokens, module)?)?;
    module.add_function(wrap_pyfunction!(allocate, module)?)?;
    module.add_function(wrap_pyfunction!(place, module)?)?;
    module.add_function(wrap_pyfunction!(copy_holders, module)?)?;
    module.add_function(wrap_pyfunction!(primaries, module)?)?;
    module.add_function(wrap_pyfunction!(unit_copy_holders, module)?)?;
    module.add_function(wrap_pyfunction!(recovery_plan, module)?)?;
    module.add_class::<RecoveryPlan>()
}

type Matrix<'py> = Bound<'py, PyArray2<i64>>;

/// The numbers of an array in C order, without a copy if it is stored so.
fn numbers<'a>(array: &'a PyReadonlyArray2<'_, i64>) -> std::borrow::Cow<'a, [i64]> {
    match array.as_slice() {
        Ok(numbers) if array.is_c_contiguous() => numbers.into(),
        _ => array.as_array().iter().copied().collect::<Vec<_>>().into(),
    }
}

fn matrix(py: Python<'_>, numbers: Vec<i64>, shape: [usize; 2]) -> PyResult<Matrix<'_>> {
    PyArray1::from_vec(py, numbers).reshape(shape)
}

fn shape_error(what: String) -> PyErr {
    Error::Invalid(what).into()
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
    Ok((self::matrix(py, split.send, [experts, ranks])?, self::matrix(py, split.receive, [ranks, experts])?))
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
    matrix(py, placed, [ranks, replicas.len()])
}

#[pyfunction]
fn copy_holders(nodes: Vec<String>, copies: usize) -> PyResult<Vec<Vec<usize>>> {
    Ok(placement::copy_holders(&nodes, copies)?)
}

#[pyfunction]
fn primaries(holders: Vec<Vec<usize>>, nbytes: Vec<u64>, ranks: usize) -> PyResult<Vec<usize>> {
    Ok(placement::primaries(&holders, &nbytes, ranks)?)
}

/// What to do after a failure: the version to continue from and the transfers that lead there.
#[pyclass(frozen, module = "evermoe._native")]
struct RecoveryPlan {
    names: Vec<String>,
    plan: Plan,
}

#[pymethods]
impl RecoveryPlan {
    #[getter]
    fn version(&self) -> Option<u64> {
        self.plan.version
    }

    #[getter]
    fn lost(&self) -> Vec<&str> {
        self.plan.lost.iter().map(|&unit| self.name(unit)).collect()
    }

    #[getter]
    fn transfers(&self) -> Vec<(&str, usize, usize, &'static str)> {
        let row = |transfer: &recovery::Transfer| {
            (self.name(transfer.unit), transfer.source, transfer.destination, kind_name(transfer.kind))
        };
        self.plan.transfers.iter().map(row).collect()
    }

    #[getter]
    fn conflicts(&self) -> Vec<(&str, usize, u64, u64)> {
        let row = |conflict: &recovery::Conflict| {
            (self.name(conflict.unit), conflict.rank, conflict.digest, conflict.expected)
        };
        self.plan.conflicts.iter().map(row).collect()
    }

    #[getter]
    fn reason(&self) -> String {
        self.plan.reason.to_string()
    }

    fn __repr__(&self) -> String {
        let Plan { version, lost, transfers, conflicts, reason } = &self.plan;
        let version = version.map_or("None".into(), |version| version.to_string());
        format!(
            "RecoveryPlan(version={version}, {} lost, {} transfers, {} conflicts: {reason})",
            lost.len(),
            transfers.len(),
            conflicts.len()
        )
    }
}

impl RecoveryPlan {
    fn name(&self, unit: usize) -> &str {
        &self.names[unit]
    }
}

fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Active => "active",
        Kind::Snapshot => "snapshot",
    }
}

fn kind(name: &str) -> PyResult<Kind> {
    match name {
        "active" => Ok(Kind::Active),
        "snapshot" => Ok(Kind::Snapshot),
        _ => Err(Error::Invalid(format!("holdings: expected kind \"active\" or \"snapshot\", got {name:?}"))
            .into()),
    }
}

#[pyfunction]
fn recovery_plan(
    py: Python<'_>,
    units: Vec<(String, u64)>,
    holdings: Vec<Vec<(String, u64, u64, String)>>,
    needs: Vec<Vec<String>>,
) -> PyResult<RecoveryPlan> {
    let (names, bytes): (Vec<String>, Vec<u64>) = units.into_iter().unzip();
    let index: HashMap<&str, usize> =
        names.iter().enumerate().map(|(unit, name)| (name.as_str(), unit)).collect();
    if index.len() != names.len() {
        return Err(Error::Invalid("units: a name is there twice; names must be unique".into()).into());
    }
    let find = |argument: &str, rank: usize, name: &str| -> PyResult<usize> {
        let unknown =
            || Error::Invalid(format!("{argument}: rank {rank} names {name:?}, which is not one of units"));
        Ok(*index.get(name).ok_or_else(unknown)?)
    };
    let mut held = vec![Vec::new(); holdings.len()];
    for (rank, rows) in holdings.iter().enumerate() {
        for (name, version, digest, from) in rows {
            let unit = find("holdings", rank, name)?;
            held[rank].push(Holding { unit, version: *version, digest: *digest, kind: kind(from)? });
        }
    }
    let mut needed = vec![Vec::new(); needs.len()];
    for (rank, row) in needs.iter().enumerate() {
        for name in row {
            needed[rank].push(find("needs", rank, name)?);
        }
    }
    let plan = py.detach(|| recovery::plan(&bytes, &held, &needed))?;
    Ok(RecoveryPlan { names, plan })
}

#[pyfunction]
fn unit_copy_holders(
    primaries: Vec<usize>,
    active: Vec<Vec<usize>>,
    nodes: Vec<String>,
    copies: usize,
) -> PyResult<Vec<Vec<usize>>> {
    Ok(placement::unit_copy_holders(&primaries, &active, &nodes, copies)?)
}
