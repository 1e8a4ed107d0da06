//! The crate's error, by what the caller can do about it. `src/python` maps each variant to one Python exception.

use std::io;
use std::path::PathBuf;

/// Error of the crate, by what the caller can do about it.
///
/// The message says what was expected, what came, and what to do. The fields are for programs.
///
/// ```
/// use evermoe::Error;
/// let error = evermoe::placement::allocate(&[1.0, 2.0], 0, 1, 1).unwrap_err();
/// let Error::Invalid { argument, .. } = &error else { panic!("{error}") };
/// assert_eq!(argument.as_deref(), Some("slots"));
/// assert!(error.to_string().starts_with("slots: 2 experts do not fit in 0 nodes × 1 slots = 0"));
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is wrong: correct it. Python's `ValueError`.
    #[error("{}{problem}", named(argument))]
    Invalid {
        /// Name of the argument, or of several; none where the problem concerns them as a set.
        argument: Option<String>,
        /// What was expected, and what came.
        problem: String,
    },
    /// The operating system or an object store refused: `source` has the reason. Python's `OSError`.
    #[error("{context}: {source}")]
    Io {
        /// Operation that failed, with its path or URL.
        context: String,
        /// The file or folder; none where the operation concerns no file.
        path: Option<PathBuf>,
        /// The system's own error.
        source: io::Error,
    },
    /// Bytes do not match their digest, or a file is not what it claims to be: use another copy. `evermoe.CorruptCopy`.
    #[error("{}{problem}", named(object))]
    Corrupt {
        /// Path or URL of the damaged object; none where the caller passed its bytes.
        object: Option<String>,
        /// Names of the damaged units; empty where the damage concerns the object.
        units: Vec<String>,
        /// What was expected, and what came.
        problem: String,
    },
    /// The awaited result was cancelled and will not come: `evermoe.errors.CaptureCancelled`.
    #[error("{operation} was cancelled: {reason}")]
    Cancelled {
        /// Operation whose result was awaited.
        operation: String,
        /// Reason that its canceller gave.
        reason: String,
    },
    /// This build or this process lacks a library: install it, or use another device. Python's `RuntimeError`.
    #[error("{problem}")]
    Unavailable {
        /// The missing library or part of the build.
        what: &'static str,
        /// What is missing, and how to get it.
        problem: String,
    },
    /// A call of the CUDA driver failed. After most codes the process cannot use the device again. Python's `RuntimeError`.
    #[error("CUDA: {call} failed: {problem}")]
    Cuda {
        /// The call.
        call: String,
        /// The driver's `CUresult`; none where the call succeeded without a result.
        code: Option<u32>,
        /// The driver's text, and what to do where that is known.
        problem: String,
    },
    /// A call of NCCL failed: connect its ranks again. Python's `RuntimeError`.
    #[error("{call} failed: {problem}")]
    Nccl {
        /// The call.
        call: String,
        /// NCCL's text, or why nobody waits any longer.
        problem: String,
    },
    /// A call of libtorch failed. Python's `RuntimeError`.
    #[error("{call} failed: {reason}")]
    Torch {
        /// The call.
        call: String,
        /// Torch's text.
        reason: String,
    },
    /// Something failed that should not: a bug of evermoe or of its caller. Python's `RuntimeError`.
    #[error("{0}")]
    Internal(String),
}

/// The crate's result.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An [`Error::Invalid`] of a message that begins with the argument's name and a colon, if it concerns one.
    ///
    /// ```
    /// use evermoe::Error;
    /// let argument = |message: &str| match Error::invalid(message) {
    ///     Error::Invalid { argument, .. } => argument,
    ///     _ => None,
    /// };
    /// assert_eq!(argument("cluster.nodes: expected 1 or more, got 0").as_deref(), Some("cluster.nodes"));
    /// assert_eq!(argument("layers, experts: expected 1 or more of each").as_deref(), Some("layers, experts"));
    /// assert_eq!(argument("the counts add up to 3: expected 4"), None);
    /// ```
    pub fn invalid(message: impl Into<String>) -> Self {
        let message = message.into();
        match message.split_once(": ") {
            Some((names, problem)) if names.split(", ").all(is_name) => {
                Self::Invalid { argument: Some(names.to_owned()), problem: problem.to_owned() }
            }
            _ => Self::Invalid { argument: None, problem: message },
        }
    }

    /// An [`Error::Io`] that concerns no file.
    pub fn io(context: impl Into<String>, source: io::Error) -> Self {
        Self::Io { context: context.into(), path: None, source }
    }

    /// An [`Error::Io`] of a file or folder: `operation` is followed by the path.
    pub fn file(operation: &str, path: impl Into<PathBuf>, source: io::Error) -> Self {
        let path = path.into();
        Self::Io { context: format!("{operation} {}", path.display()), path: Some(path), source }
    }

    /// An [`Error::Corrupt`] of bytes that the caller passed.
    pub fn corrupt(problem: impl Into<String>) -> Self {
        Self::Corrupt { object: None, units: Vec::new(), problem: problem.into() }
    }

    /// An [`Error::Cancelled`].
    pub fn cancelled(operation: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Cancelled { operation: operation.into(), reason: reason.into() }
    }

    /// Names the object of an [`Error::Corrupt`] that has none yet; leaves other errors as they are.
    #[must_use]
    pub fn of_object(self, name: impl Into<String>) -> Self {
        match self {
            Self::Corrupt { object: None, units, problem } => {
                Self::Corrupt { object: Some(name.into()), units, problem }
            }
            other => other,
        }
    }

    /// Puts a word and a colon before the message of an [`Error::Invalid`], as "layer 3"; leaves other errors as they are.
    pub(crate) fn within(self, part: &str) -> Self {
        match self {
            Self::Invalid { argument, problem } => {
                let (argument, problem) = match argument {
                    Some(name) => (Some(format!("{part}: {name}")), problem),
                    None => (None, format!("{part}: {problem}")),
                };
                Self::Invalid { argument, problem }
            }
            other => other,
        }
    }
}

/// The name before the problem in a message.
fn named(name: &Option<String>) -> String {
    name.as_ref().map(|name| format!("{name}: ")).unwrap_or_default()
}

/// Whether a word is an argument's name, or a path of names.
fn is_name(word: &str) -> bool {
    word.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_')
        && word.chars().all(|next| next.is_ascii_alphanumeric() || "_.".contains(next))
}

/// Returns the value of an enumeration with this name, for `FromStr`; `argument` begins the message.
pub(crate) fn find_named<T: Copy>(
    argument: &str,
    all: &[T],
    name_of: fn(T) -> &'static str,
    name: &str,
) -> Result<T> {
    all.iter().copied().find(|&each| name_of(each) == name).ok_or_else(|| {
        let names: Vec<&str> = all.iter().map(|&each| name_of(each)).collect();
        Error::invalid(format!("{argument}: expected one of {}, got {name:?}", names.join(", ")))
    })
}

/// Returns [`Error::Invalid`] with the formatted message unless the condition holds. The message begins with the argument's
/// name and a colon.
macro_rules! ensure {
    ($condition:expr, $($message:tt)*) => {
        if !$condition {
            return Err($crate::Error::invalid(format!($($message)*)));
        }
    };
}

pub(crate) use ensure;
