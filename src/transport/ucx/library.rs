//! UCX itself: loaded when a member asks for it first, and kept until the process ends.

use super::ffi::{self, Functions, Handle, Params, Status};
use crate::error::{Error, Result};
use std::ffi::{CStr, CString, c_uint};
use std::ptr::null;
use std::sync::{Mutex, PoisonError};

/// The oldest version that outlives the loss of a member: older ones lose a message for good, or abort the process.
const OLDEST: (c_uint, c_uint) = (1, 16);
/// All messages wait until there is room for them.
const ALL_WAIT: (&CStr, &CStr) = (c"RNDV_THRESH", c"0");
/// Receivers read from senders' memory: so they alone write into theirs, and not once they have given up.
const RECEIVERS_READ: (&CStr, &CStr) = (c"RNDV_SCHEME", c"get_zcopy");
/// Without RDMA nobody writes but a process itself. Messages would be cut into pieces and copied if receivers had to read.
const AS_IS_FASTEST: (&CStr, &CStr) = (c"RNDV_SCHEME", c"auto");
/// The network cards of this machine that have RDMA.
const CARDS: &str = "/sys/class/infiniband";

/// The library's functions, and its context, which all workers of this process share.
pub(crate) struct Ucx {
    pub(super) call: Functions,
    pub(super) context: Handle,
}

// SAFETY: functions of a library that stays, and a context that is made for workers of several threads.
unsafe impl Send for Ucx {}
// SAFETY: as above.
unsafe impl Sync for Ucx {}

impl std::fmt::Debug for Ucx {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Ucx").finish_non_exhaustive()
    }
}

impl Ucx {
    /// The library: the first one of these names or paths that is there and fits, unless the process has it already.
    ///
    /// # Errors
    /// [`Error::Invalid`] where there is none.
    pub(crate) fn open(libraries: &[String]) -> Result<&'static Self> {
        static OPENED: Mutex<Option<&'static Ucx>> = Mutex::new(None);
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ucx) = *opened {
            return Ok(ucx);
        }
        let mut found = Vec::new();
        for name in libraries {
            match Self::load(name) {
                // It stays: its hooks in the process cannot be taken out.
                Ok(ucx) => return Ok(opened.insert(Box::leak(Box::new(ucx)))),
                Err(error) => found.push(format!("{name}: {error}")),
            }
        }
        let (major, minor) = OLDEST;
        Err(Error::invalid(format!(
            "transport: \"ucx\" needs UCX {major}.{minor} or newer, and found none ({}): install the system's \
             (libucx0, ucx), or the package libucx-cu12, or use transport \"tcp\"",
            found.join("; ")
        )))
    }

    fn load(name: &str) -> std::result::Result<Self, String> {
        let path = CString::new(name).map_err(|_| "a path has no NUL".to_owned())?;
        // SAFETY: a C string; what the library does at its start is UCX's business.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: it is null, or a C string that stays until this thread's next call.
            let error = unsafe { libc::dlerror().as_ref().map(|error| CStr::from_ptr(error)) };
            return Err(error.map_or("not found".into(), |error| error.to_string_lossy().into_owned()));
        }
        // SAFETY: it is libucp's, as it has these names, and is never closed.
        let call = unsafe { Functions::resolve(handle) }.map_err(|name| format!("it has no {name}"))?;
        let (mut major, mut minor, mut patch) = (0, 0, 0);
        // SAFETY: room for three numbers.
        unsafe { (call.ucp_get_version)(&raw mut major, &raw mut minor, &raw mut patch) };
        if (major, minor) < OLDEST || major != OLDEST.0 {
            return Err(format!("it is UCX {major}.{minor}.{patch}"));
        }
        let context = start(&call)?;
        Ok(Self { call, context })
    }

    /// Fails with UCX's words for an error.
    pub(super) fn check(&self, status: Status) -> std::io::Result<()> {
        if status < ffi::OK { Err(std::io::Error::other(explain(&self.call, status))) } else { Ok(()) }
    }
}

fn explain(call: &Functions, status: Status) -> String {
    // SAFETY: it is a C string that stays, for all numbers.
    let text = unsafe { CStr::from_ptr((call.ucs_status_string)(status)) };
    format!("UCX: {}", text.to_string_lossy())
}

fn start(call: &Functions) -> std::result::Result<Handle, String> {
    let done = |status| if status == ffi::OK { Ok(()) } else { Err(explain(call, status)) };
    let mut config = std::ptr::null_mut();
    // SAFETY: no prefix and no file, and room for a handle.
    done(unsafe { (call.ucp_config_read)(null(), null(), &raw mut config) })?;
    let has_rdma = std::fs::read_dir(CARDS).is_ok_and(|mut cards| cards.next().is_some());
    let scheme = if has_rdma { RECEIVERS_READ } else { AS_IS_FASTEST };
    let set = [ALL_WAIT, scheme].into_iter().try_for_each(|(name, value)| {
        // SAFETY: a live configuration, and C strings.
        done(unsafe { (call.ucp_config_modify)(config, name.as_ptr(), value.as_ptr()) })
    });
    let params = Params::of_messages();
    let (mut context, (major, minor)) = (std::ptr::null_mut(), OLDEST);
    let started = set.and_then(|()| {
        // SAFETY: all live through the call; the fields in the mask are set.
        done(unsafe { (call.ucp_init_version)(major, minor, &raw const params, config, &raw mut context) })
    });
    // SAFETY: it was read above, and is not used any more.
    unsafe { (call.ucp_config_release)(config) };
    started.map(|()| context)
}
