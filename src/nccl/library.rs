//! The part of NCCL's C interface in use: signatures of `nccl.h` from NCCL 2.28, resolved in the library that torch has loaded.

use crate::error::{Error, Result};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// `ncclComm_t`.
pub(super) type Handle = *mut c_void;
/// `cudaStream_t`.
pub(super) type Stream = *mut c_void;
/// `ncclResult_t`.
pub(super) type Status = c_int;

pub(super) const SUCCESS: Status = 0;
pub(super) const IN_PROGRESS: Status = 7;
/// `ncclInt8`.
pub(super) const BYTE: c_int = 0;
/// `ncclSum`.
pub(super) const SUM: c_int = 0;
/// The oldest version with communicators that do not block.
const OLDEST: c_int = 21400;

/// `ncclUniqueId`: names a communicator, and has the address at which its ranks find each other.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId(pub(super) [u8; UniqueId::BYTES]);

impl UniqueId {
    /// Size in bytes.
    pub const BYTES: usize = 128;

    /// Returns the name as bytes, to send it to other ranks.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns a name received as bytes.
    ///
    /// # Errors
    /// [`Error::Invalid`] for another number of bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let wrong = |_| Error::invalid(format!("id: expected {} bytes, got {}", Self::BYTES, bytes.len()));
        Ok(Self(bytes.try_into().map_err(wrong)?))
    }
}

impl std::fmt::Debug for UniqueId {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("UniqueId").finish_non_exhaustive()
    }
}

/// `ncclConfig_t` as of 2.14: newer versions take what it lacks from their defaults.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
}

impl Config {
    /// Calls return at once, and what they began is over when `ncclCommGetAsyncError` says so.
    pub(super) const NON_BLOCKING: Self =
        Self { size: size_of::<Self>(), magic: 0xcafe_beef, version: OLDEST as c_uint, blocking: 0 };
}

macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*) -> $result:ty;)*) => {
        /// NCCL's functions.
        #[allow(non_snake_case)]
        pub(super) struct Nccl {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Nccl {
            fn resolve(find: impl Fn(&CStr) -> *mut c_void) -> std::result::Result<Self, &'static str> {
                Ok(Self {
                    $($name: {
                        let found = find(CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()).unwrap_or_default());
                        if found.is_null() {
                            return Err(stringify!($name));
                        }
                        // SAFETY: NCCL's function of this name has this signature in all versions from 2.14.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> $result>(found) }
                    },)*
                })
            }
        }
    };
}

functions! {
    ncclGetVersion: fn(*mut c_int) -> Status;
    ncclGetUniqueId: fn(*mut UniqueId) -> Status;
    ncclGetErrorString: fn(Status) -> *const c_char;
    ncclGetLastError: fn(Handle) -> *const c_char;
    ncclCommInitRankConfig: fn(*mut Handle, c_int, UniqueId, c_int, *const Config) -> Status;
    ncclCommGetAsyncError: fn(Handle, *mut Status) -> Status;
    ncclCommAbort: fn(Handle) -> Status;
    ncclAllReduce: fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, Stream) -> Status;
    ncclAllGather: fn(*const c_void, *mut c_void, usize, c_int, Handle, Stream) -> Status;
    ncclSend: fn(*const c_void, usize, c_int, c_int, Handle, Stream) -> Status;
    ncclRecv: fn(*mut c_void, usize, c_int, c_int, Handle, Stream) -> Status;
    ncclGroupStart: fn() -> Status;
    ncclGroupEnd: fn() -> Status;
}

impl Nccl {
    /// Returns the library that is in this process already, torch's own: a second one would not share its state.
    pub(super) fn loaded() -> Result<&'static Self> {
        static LOADED: OnceLock<std::result::Result<Nccl, String>> = OnceLock::new();
        LOADED.get_or_init(Self::look_up).as_ref().map_err(|reason| {
            let problem =
                format!("NCCL: {reason}; expected torch with CUDA, which brings NCCL 2.14 or newer");
            Error::Unavailable { what: "NCCL", problem }
        })
    }

    fn look_up() -> std::result::Result<Self, String> {
        // SAFETY: a C string, which is looked up in what is loaded; nothing is initialised.
        let global = |name: &CStr| unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
        let nccl = Self::resolve(global).or_else(|_| {
            // SAFETY: a C string; with RTLD_NOLOAD only a library that is loaded is found.
            let library =
                unsafe { libc::dlopen(c"libnccl.so.2".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
            if library.is_null() {
                return Err("this process has not loaded libnccl.so.2".to_owned());
            }
            // SAFETY: a library that stays open, and a C string.
            Self::resolve(|name| unsafe { libc::dlsym(library, name.as_ptr()) })
                .map_err(|name| format!("it has no {name}"))
        })?;
        let mut version = 0;
        // SAFETY: room for a number.
        unsafe { (nccl.ncclGetVersion)(&raw mut version) };
        if version < OLDEST { Err(format!("it has version {version}")) } else { Ok(nccl) }
    }

    /// Returns a failed call of NCCL as an error, with NCCL's texts.
    pub(super) fn error(&self, call: &str, status: Status) -> Error {
        // SAFETY: it returns a static C string for all numbers.
        let what = unsafe { CStr::from_ptr((self.ncclGetErrorString)(status)) };
        // SAFETY: null stands for no communicator; the text is copied before another call can change it.
        let last = unsafe { (self.ncclGetLastError)(std::ptr::null_mut()).as_ref() };
        // SAFETY: a C string.
        let last = last.map(|text| unsafe { CStr::from_ptr(text) }.to_string_lossy()).unwrap_or_default();
        failed(call, format!("{} ({status}) {last}", what.to_string_lossy()).trim_end())
    }
}

pub(super) fn failed(call: &str, problem: impl Into<String>) -> Error {
    Error::Nccl { call: call.to_owned(), problem: problem.into() }
}

impl std::fmt::Debug for Nccl {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Nccl").finish_non_exhaustive()
    }
}
