//! The presets, the constants of copies and the budgets of partial presets for Python: dicts and numbers.

use crate::protection::{self, Preset, PresetName};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let presets = protection::PRESETS.iter().map(|preset| row(module.py(), preset));
    module.add("PRESETS", PyTuple::new(module.py(), presets.collect::<PyResult<Vec<_>>>()?)?)?;
    for (name, value) in [
        ("OWN_VERSIONS", protection::OWN_VERSIONS),
        ("RECORD_BYTES", protection::RECORD_BYTES),
        ("BATCH_STEPS", protection::BATCH_STEPS),
        ("LOGGED_STEPS", protection::LOGGED_STEPS),
        ("LOG_STEPS", protection::LOG_STEPS),
        ("MAX_PERIOD", protection::MAX_PERIOD as u64),
    ] {
        module.add(name, value)?;
    }
    module.add("FAILURE", protection::FAILURE)?;
    module.add_function(wrap_pyfunction!(preset_replicas, module)?)?;
    module.add_function(wrap_pyfunction!(levels, module)?)?;
    module.add_function(wrap_pyfunction!(batch_steps, module)?)?;
    module.add_function(wrap_pyfunction!(copy_budget, module)?)?;
    module.add_function(wrap_pyfunction!(unmeasured_budget, module)?)
}

/// The fields of `evermoe.planning.Preset`.
fn row<'py>(py: Python<'py>, preset: &Preset) -> PyResult<Bound<'py, PyDict>> {
    let row = PyDict::new(py);
    let kinds = preset.kinds.iter().map(|kind| kind.name());
    row.set_item("name", preset.name.name())?;
    row.set_item("summary", preset.summary)?;
    row.set_item("copying", preset.copying.name())?;
    row.set_item("selection", preset.selection.name())?;
    row.set_item("schedule", preset.schedule.map(|policy| policy.name()))?;
    row.set_item("kinds", PyTuple::new(py, kinds.collect::<Vec<_>>())?)?;
    row.set_item("placement", preset.placement.name())?;
    row.set_item("token_split", preset.token_split.name())?;
    row.set_item("lagging", preset.lagging.name())?;
    row.set_item("copies_late", preset.copies_late)?;
    row.set_item("per_expert_versions", preset.per_expert_versions)?;
    row.set_item("needs_checkpoint_dir", preset.needs_checkpoint_dir)?;
    row.set_item("active_copies", preset.active_copies)?;
    row.set_item("max_replication", preset.max_replication())?;
    row.set_item("protects_owners", preset.protects_owners())?;
    Ok(row)
}

#[pyfunction]
#[pyo3(signature = (name, replication, min_replicas))]
fn preset_replicas(name: &str, replication: usize, min_replicas: Option<usize>) -> PyResult<usize> {
    Ok(name.parse::<PresetName>()?.preset().replicas(replication, min_replicas))
}

/// Experts of each layer that `pec` copies to its snapshots, and to the store.
#[pyfunction]
#[pyo3(signature = (experts, per_snapshot, per_save))]
fn levels(experts: usize, per_snapshot: Option<usize>, per_save: Option<usize>) -> (usize, usize) {
    let found = protection::levels(experts, per_snapshot, per_save);
    (found.snapshot, found.save)
}

#[pyfunction]
fn batch_steps(elements: u64) -> u64 {
    protection::batch_steps(elements)
}

#[pyfunction]
fn copy_budget(step_seconds: f64, speeds: Vec<Option<f64>>) -> Option<u64> {
    protection::copy_budget(step_seconds, &speeds)
}

#[pyfunction]
fn unmeasured_budget(expert_bytes: u64, all_bytes: u64) -> u64 {
    protection::unmeasured_budget(expert_bytes, all_bytes)
}
