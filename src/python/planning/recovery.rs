//! Python bindings of [`crate::recovery`].

use crate::error::Error;
use crate::recovery::{self, Holding, Kind, Knowledge, Plan};
use pyo3::prelude::*;
use std::collections::HashMap;

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(recovery_plan, module)?)?;
    module.add_function(wrap_pyfunction!(usable_holdings, module)?)?;
    module.add_class::<RecoveryPlan>()
}

/// Plan of a recovery: the version to continue from, and the transfers.
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
    fn stale(&self) -> Vec<(&str, u64)> {
        self.plan.stale.iter().map(|&(unit, version)| (self.name(unit), version)).collect()
    }

    #[getter]
    fn transfers(&self) -> Vec<(&str, usize, usize, &'static str)> {
        let row = |transfer: &recovery::Transfer| {
            (self.name(transfer.unit), transfer.source, transfer.destination, transfer.kind.name())
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
        let Plan { version, lost, stale, transfers, conflicts, reason } = &self.plan;
        let version = version.map_or("None".into(), |version| version.to_string());
        format!(
            "RecoveryPlan(version={version}, {} lost, {} transfers, {} conflicts, {} stale: {reason})",
            lost.len(),
            transfers.len(),
            conflicts.len(),
            stale.len()
        )
    }
}

impl RecoveryPlan {
    fn name(&self, unit: usize) -> &str {
        &self.names[unit]
    }
}

fn kind(name: &str) -> PyResult<Kind> {
    let found = Kind::ALL.into_iter().find(|each| each.name() == name);
    let kinds = Kind::ALL.map(|each| format!("{:?}", each.name())).join(", ");
    Ok(found.ok_or_else(|| Error::invalid(format!("holdings: expected kind {kinds}, got {name:?}")))?)
}

#[pyfunction]
fn recovery_plan(
    py: Python<'_>,
    units: Vec<(String, u64)>,
    holdings: Vec<Vec<(String, u64, u64, String)>>,
    needs: Vec<Vec<String>>,
    may_lag: Vec<String>,
    nodes: Vec<usize>,
) -> PyResult<RecoveryPlan> {
    let (names, bytes): (Vec<String>, Vec<u64>) = units.into_iter().unzip();
    let index: HashMap<&str, usize> =
        names.iter().enumerate().map(|(unit, name)| (name.as_str(), unit)).collect();
    if index.len() != names.len() {
        return Err(Error::invalid("units: a name occurs twice; names must be unique").into());
    }
    let find = |name: &str, whose: &dyn Fn() -> String| -> PyResult<usize> {
        let unknown = || Error::invalid(format!("{} names {name:?}, which is not one of units", whose()));
        Ok(*index.get(name).ok_or_else(unknown)?)
    };
    let mut held = vec![Vec::new(); holdings.len()];
    for (rank, rows) in holdings.iter().enumerate() {
        for (name, version, digest, from) in rows {
            let unit = find(name, &|| format!("holdings: rank {rank}"))?;
            held[rank].push(Holding { unit, version: *version, digest: *digest, kind: kind(from)? });
        }
    }
    let mut needed = vec![Vec::new(); needs.len()];
    for (rank, row) in needs.iter().enumerate() {
        for name in row {
            needed[rank].push(find(name, &|| format!("needs: rank {rank}"))?);
        }
    }
    let lagging: Vec<usize> =
        may_lag.iter().map(|name| find(name, &|| "may_lag: it".into())).collect::<PyResult<_>>()?;
    let plan = py.detach(|| recovery::plan_on_nodes(&bytes, &held, &needed, &lagging, &nodes))?;
    Ok(RecoveryPlan { names, plan })
}

/// A row of holdings: unit, version, digest, kind.
type Row = (String, u64, u64, String);

#[pyfunction]
fn usable_holdings(members: Vec<(bool, bool)>, holdings: Vec<Vec<Row>>) -> PyResult<Vec<Vec<Row>>> {
    let known: Vec<Knowledge> = members
        .into_iter()
        .map(|(established, saw_progress)| Knowledge { established, saw_progress })
        .collect();
    let names: Vec<String> = holdings.iter().flatten().map(|(name, ..)| name.clone()).collect();
    let mut unit = 0..;
    let mut held = Vec::with_capacity(holdings.len());
    for rows in holdings {
        let read = |(_, version, digest, from): Row| -> PyResult<Holding> {
            let unit = unit.next().unwrap_or_default();
            Ok(Holding { unit, version, digest, kind: kind(&from)? })
        };
        held.push(rows.into_iter().map(read).collect::<PyResult<Vec<_>>>()?);
    }
    let row = |holding: Holding| {
        (names[holding.unit].clone(), holding.version, holding.digest, holding.kind.name().to_owned())
    };
    Ok(recovery::usable(&known, held).into_iter().map(|rows| rows.into_iter().map(row).collect()).collect())
}
