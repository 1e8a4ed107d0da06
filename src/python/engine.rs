//! Python bindings of [`crate::engine`].

use super::planning::TokenLedger;
use crate::engine;
use crate::selection::Selection;
use numpy::PyReadonlyArray2;
use pyo3::prelude::*;

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("LOAD_HALF_LIFE", engine::LOAD_HALF_LIFE)?;
    module.add("MAX_VERSION_STEPS", engine::MAX_VERSION_STEPS)?;
    module.add_class::<VersionSchedule>()?;
    module.add_class::<Selector>()
}

/// See [`engine::VersionSchedule`].
#[pyclass(module = "evermoe._native")]
struct VersionSchedule {
    schedule: engine::VersionSchedule,
    #[pyo3(get, set)]
    is_used: bool,
}

#[pymethods]
impl VersionSchedule {
    #[new]
    #[pyo3(signature = (step=0))]
    fn new(step: u64) -> Self {
        Self { schedule: engine::VersionSchedule::new(step), is_used: true }
    }

    #[getter]
    fn begun(&self) -> u64 {
        self.schedule.begun()
    }

    fn restart(&mut self, step: u64) {
        self.schedule = engine::VersionSchedule::new(step);
    }

    fn is_due(&self, step: u64) -> bool {
        self.schedule.is_due(step)
    }

    fn begin_version(&mut self, step: u64, steps: u64) {
        self.schedule.begin_version(step, steps);
    }

    fn lag(&self, step: u64) -> u64 {
        if self.is_used { self.schedule.lag(step) } else { 0 }
    }
}

/// See [`engine::Selector`].
#[pyclass(module = "evermoe._native")]
struct Selector(engine::Selector);

#[pymethods]
impl Selector {
    #[new]
    #[pyo3(signature = (nbytes, is_sequential, remote_bytes_per_step, local_bytes_per_step))]
    fn new(
        nbytes: Vec<u64>,
        is_sequential: bool,
        remote_bytes_per_step: Option<u64>,
        local_bytes_per_step: Option<u64>,
    ) -> Self {
        let budgets = engine::Budgets { remote: remote_bytes_per_step, local: local_bytes_per_step };
        Self(engine::Selector::new(&nbytes, is_sequential, budgets))
    }

    fn replan(&mut self, active: Vec<Vec<usize>>, kept: Vec<bool>, ranks: usize) -> PyResult<()> {
        Ok(self.0.replan(&active, kept, ranks)?)
    }

    #[pyo3(signature = (ledger, average, measured=None))]
    fn select_to_follow(
        &self,
        ledger: PyRef<'_, TokenLedger>,
        average: PyReadonlyArray2<'_, f64>,
        measured: Option<u64>,
    ) -> PyResult<Selection> {
        let average: Vec<f64> = average.as_array().iter().copied().collect();
        Ok(self.0.select_to_follow(&ledger.0, &average, measured)?)
    }

    #[pyo3(signature = (ledger, measured=None))]
    fn select_within_budget(
        &self,
        ledger: PyRef<'_, TokenLedger>,
        measured: Option<u64>,
    ) -> PyResult<Selection> {
        Ok(self.0.select_within_budget(&ledger.0, measured)?)
    }

    fn select_in_turn(&self, ledger: PyRef<'_, TokenLedger>) -> PyResult<Selection> {
        Ok(self.0.select_in_turn(&ledger.0)?)
    }
}
