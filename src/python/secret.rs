//! Python bindings of [`crate::secret`].

use crate::secret;
use pyo3::prelude::*;

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Secret>()
}

/// See [`secret::Secret`].
#[pyclass(frozen, module = "evermoe._native")]
pub(super) struct Secret(secret::Secret);

impl Secret {
    pub(super) fn get(&self) -> &secret::Secret {
        &self.0
    }
}

#[pymethods]
impl Secret {
    #[new]
    fn new(text: &str) -> PyResult<Self> {
        Ok(Self(secret::Secret::new(text)?))
    }

    fn tag(&self, purpose: &str, parts: Vec<Vec<u8>>) -> Vec<u8> {
        self.0.tag(purpose, &slices(&parts)).into()
    }

    fn is_tag(&self, tag: Vec<u8>, purpose: &str, parts: Vec<Vec<u8>>) -> bool {
        self.0.is_tag(&tag, purpose, &slices(&parts))
    }
}

fn slices(parts: &[Vec<u8>]) -> Vec<&[u8]> {
    parts.iter().map(Vec::as_slice).collect()
}
