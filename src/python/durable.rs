//! Python bindings of files that are on disk when the call returns.

use super::snapshot::bytes_of;
use crate::durable::{self, Content, Piece};
use numpy::PyReadonlyArray1;
use pyo3::prelude::*;
use std::collections::HashMap;
use std::path::PathBuf;

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(write_safetensors, module)?)
}

/// Name, type, shape and bytes of a tensor.
type Tensor<'py> = (String, String, Vec<usize>, PyReadonlyArray1<'py, u8>);

#[pyfunction]
#[pyo3(signature = (path, tensors, metadata = None, *, threads = 4, hashed = vec![]))]
fn write_safetensors(
    py: Python<'_>,
    path: PathBuf,
    tensors: Vec<Tensor<'_>>,
    metadata: Option<HashMap<String, String>>,
    threads: usize,
    hashed: Vec<PyReadonlyArray1<'_, u8>>,
) -> PyResult<Vec<u64>> {
    let (mut pieces, mut data) = (Vec::with_capacity(tensors.len()), Vec::with_capacity(tensors.len()));
    for (name, dtype, shape, array) in &tensors {
        let bytes = bytes_of(array)?;
        pieces.push(Piece {
            name: name.clone(),
            dtype: dtype.clone(),
            shape: shape.clone(),
            bytes: bytes.len(),
        });
        data.push(bytes);
    }
    let (head, order) = durable::header(&pieces, metadata)?;
    let content = Content::new(std::iter::once(&head[..]).chain(order.iter().map(|&at| data[at])));
    let hashed = hashed.iter().map(bytes_of).collect::<PyResult<Vec<&[u8]>>>()?;
    Ok(py.detach(|| durable::write_hashed(&path, &content, threads, &hashed))?)
}
