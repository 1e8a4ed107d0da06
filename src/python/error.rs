//! The one place where an [`Error`] becomes a Python exception.

use crate::error::Error;
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        match error {
            Error::Invalid(_) => PyValueError::new_err(message),
            // With the number of the error Python picks the subclass: FileNotFoundError, FileExistsError, …
            Error::Io { source, .. } => match source.raw_os_error() {
                Some(code) => PyOSError::new_err((code, message)),
                None => PyOSError::new_err(message),
            },
            Error::Corrupt(_) => Python::attach(|py| corrupt_copy(py, message).unwrap_or_else(|error| error)),
            Error::Runtime(_) => PyRuntimeError::new_err(message),
        }
    }
}

/// `evermoe.errors.CorruptCopy`, imported when it is needed: the package itself imports this module.
fn corrupt_copy(py: Python<'_>, message: String) -> PyResult<PyErr> {
    let class = py.import("evermoe.errors")?.getattr("CorruptCopy")?;
    Ok(PyErr::from_value(class.call1((message,))?))
}
