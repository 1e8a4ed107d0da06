//! Errors by what the caller can do about them. `src/python` maps each variant to one Python exception.

/// Error of the crate; the message says what was expected, what came and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An argument is wrong: Python's `ValueError`.
    #[error("{0}")]
    Invalid(String),
    /// The operating system refused: Python's `OSError`.
    #[error("{context}: {source}")]
    Io {
        /// Operation that failed, with the path.
        context: String,
        /// The system's own error.
        source: std::io::Error,
    },
    /// Bytes do not match their digest, or a file is not what it claims: `evermoe.CorruptCopy`.
    #[error("{0}")]
    Corrupt(String),
    /// The awaited result was cancelled and will not come: `evermoe.errors.CaptureCancelled`.
    #[error("{0}")]
    Cancelled(String),
    /// libtorch or the CUDA driver failed: Python's `RuntimeError`.
    #[error("{0}")]
    Runtime(String),
}

/// The crate's result.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An [`Error::Io`] with its context.
    pub fn io(context: impl Into<String>, source: std::io::Error) -> Self {
        Self::Io { context: context.into(), source }
    }
}

/// Returns [`Error::Invalid`] with the formatted message unless the condition holds.
#[macro_export]
macro_rules! ensure {
    ($condition:expr, $($message:tt)*) => {
        if !$condition {
            return Err($crate::error::Error::Invalid(format!($($message)*)));
        }
    };
}
