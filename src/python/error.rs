//! The conversion of an [`Error`] into a Python exception; the only place where that happens.

use crate::error::Error;
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        match error {
            Error::Invalid { .. } => PyValueError::new_err(message),
            // By the error number, Python chooses the subclass: FileNotFoundError, FileExistsError, …
            Error::Io { source, .. } => match source.raw_os_error() {
                Some(code) => PyOSError::new_err((code, message)),
                None => PyOSError::new_err(message),
            },
            Error::Corrupt { .. } => own("CorruptCopy", message),
            Error::Cancelled { .. } => own("CaptureCancelled", message),
            Error::Unavailable { .. }
            | Error::Cuda { .. }
            | Error::Nccl { .. }
            | Error::Torch { .. }
            | Error::Internal(_) => PyRuntimeError::new_err(message),
        }
    }
}

/// An exception of `evermoe.errors`, imported when needed, because the package itself imports this module.
fn own(name: &str, message: String) -> PyErr {
    let make = |py: Python<'_>| {
        let class = py.import("evermoe.errors")?.getattr(name)?;
        Ok(PyErr::from_value(class.call1((message,))?))
    };
    Python::attach(|py| make(py).unwrap_or_else(|error: PyErr| error))
}
