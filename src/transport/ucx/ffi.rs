//! The part of UCX's C interface in use: signatures of `ucp/api/ucp.h` from UCX 1.22, resolved in the loaded library.
//!
//! Structures have a mask of the fields that are set, and only grow at their ends. An older library reads the fields
//! that it knows and finds in the mask; a newer one finds no field that is missing in these definitions. So they end
//! with the last field of 1.22.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulong, c_void};

/// A context, a worker, an endpoint, an address or a configuration, owned by UCX.
pub(super) type Handle = *mut c_void;
/// `ucs_status_t`: 0 for success, 1 while in progress, below 0 for an error.
pub(super) type Status = c_int;
/// `ucs_status_ptr_t`: null for success, a request, or an error encoded as an address.
pub(super) type StatusOrRequest = *mut c_void;

pub(super) const OK: Status = 0;
pub(super) const IN_PROGRESS: Status = 1;
pub(super) const BUSY: Status = -15;
/// `UCS_ERR_LAST`: addresses from this one on are errors.
pub(super) const LAST_ERROR: isize = -100;

/// Callback of a listener for a new connection, with the connection request and its argument.
pub(super) type ConnCallback = unsafe extern "C" fn(Handle, *mut c_void);

/// Callback of an endpoint that has failed.
pub(super) type ErrCallback = unsafe extern "C" fn(*mut c_void, Handle, Status);

/// `ucp_params_t`.
#[repr(C)]
pub(super) struct Params {
    field_mask: u64,
    features: u64,
    request_size: usize,
    request_init: *mut c_void,
    request_cleanup: *mut c_void,
    tag_sender_mask: u64,
    mt_workers_shared: c_int,
    estimated_num_eps: usize,
    estimated_num_ppn: usize,
    name: *const c_char,
    node_local_id: usize,
}

/// `ucp_worker_params_t`.
#[repr(C)]
pub(super) struct WorkerParams {
    field_mask: u64,
    thread_mode: c_int,
    cpu_mask: [c_ulong; 1024 / c_ulong::BITS as usize],
    events: c_uint,
    user_data: *mut c_void,
    event_fd: c_int,
    flags: u64,
    name: *const c_char,
    am_alignment: usize,
    client_id: u64,
}

/// `ucp_err_handler_t`.
#[repr(C)]
pub(super) struct ErrHandler {
    call: Option<ErrCallback>,
    argument: *mut c_void,
}

/// `ucs_sock_addr_t`.
#[repr(C)]
struct SockAddr {
    addr: *const c_void,
    addrlen: u32,
}

/// `ucp_listener_params_t`.
#[repr(C)]
pub(super) struct ListenerParams {
    field_mask: u64,
    sockaddr: SockAddr,
    accept_handler: [*mut c_void; 2],
    conn_handler: ConnHandler,
}

/// `ucp_listener_conn_handler_t`.
#[repr(C)]
struct ConnHandler {
    call: Option<ConnCallback>,
    argument: *mut c_void,
}

/// `ucp_listener_attr_t`.
#[repr(C)]
pub(super) struct ListenerAttr {
    field_mask: u64,
    pub(super) sockaddr: libc::sockaddr_storage,
}

/// `ucp_ep_params_t`.
#[repr(C)]
pub(super) struct EpParams {
    field_mask: u64,
    address: *const c_void,
    err_mode: c_int,
    err_handler: ErrHandler,
    user_data: *mut c_void,
    flags: c_uint,
    sockaddr: SockAddr,
    conn_request: *mut c_void,
    name: *const c_char,
    local_sockaddr: SockAddr,
}

/// `ucp_request_param_t`.
#[repr(C)]
pub(super) struct RequestParam {
    op_attr_mask: u32,
    flags: u32,
    request: *mut c_void,
    callback: *mut c_void,
    datatype: u64,
    user_data: *mut c_void,
    reply_buffer: *mut c_void,
    memory_type: c_int,
    recv_info: *mut c_void,
    memh: *mut c_void,
    remote_datatype: u64,
    remote: *const c_void,
    remote_count: usize,
}

/// `ucp_tag_recv_info_t`.
#[derive(Default)]
#[repr(C)]
pub(super) struct TagInfo {
    sender_tag: u64,
    pub(super) length: usize,
}

/// A structure with no fields set.
///
/// # Safety
/// All of its fields may be zero.
unsafe fn unset<T>() -> T {
    // SAFETY: by the caller's promise.
    unsafe { std::mem::zeroed() }
}

macro_rules! unset_by_default {
    ($($name:ty),*) => {$(
        impl Default for $name {
            fn default() -> Self {
                // SAFETY: numbers, raw pointers and optional functions may be zero.
                unsafe { unset() }
            }
        }
    )*};
}

unset_by_default!(Params, WorkerParams, ListenerParams, ListenerAttr, EpParams, RequestParam);

impl Params {
    /// For tagged messages that wake waiting threads, with workers in several threads.
    pub(super) fn of_messages() -> Self {
        const FEATURES_AND_MT_WORKERS_SHARED: u64 = 1 << 0 | 1 << 5;
        const TAG_AND_WAKEUP: u64 = 1 << 0 | 1 << 4;
        let mask = FEATURES_AND_MT_WORKERS_SHARED;
        Self { field_mask: mask, features: TAG_AND_WAKEUP, mt_workers_shared: 1, ..Self::default() }
    }
}

impl WorkerParams {
    /// For use by any thread, one at a time.
    pub(super) fn serialized() -> Self {
        const THREAD_MODE: u64 = 1 << 0;
        const SERIALIZED: c_int = 1;
        Self { field_mask: THREAD_MODE, thread_mode: SERIALIZED, ..Self::default() }
    }
}

impl ListenerParams {
    /// Listens at an address; `call` is called with the argument for each connection.
    pub(super) fn at(address: &SockAddrBytes, call: ConnCallback, argument: *mut c_void) -> Self {
        const SOCK_ADDR_AND_CONN_HANDLER: u64 = 1 << 0 | 1 << 2;
        Self {
            field_mask: SOCK_ADDR_AND_CONN_HANDLER,
            sockaddr: SockAddr::of(address),
            conn_handler: ConnHandler { call: Some(call), argument },
            ..Self::default()
        }
    }
}

impl ListenerAttr {
    /// Queries the address.
    pub(super) fn address() -> Self {
        const SOCKADDR: u64 = 1 << 0;
        Self { field_mask: SOCKADDR, ..Self::default() }
    }
}

/// A socket address in C's form, with the number of its bytes.
pub(super) type SockAddrBytes = (libc::sockaddr_storage, libc::socklen_t);

impl SockAddr {
    fn of((address, nbytes): &SockAddrBytes) -> Self {
        Self { addr: (&raw const *address).cast(), addrlen: *nbytes }
    }
}

impl EpParams {
    /// Connects to the listener at an address.
    pub(super) fn to(address: &SockAddrBytes, on_lost: ErrCallback) -> Self {
        const SOCK_ADDR_AND_FLAGS: u64 = 1 << 4 | 1 << 5;
        const CLIENT_SERVER: c_uint = 1 << 0;
        let of = Self::may_be_lost(on_lost);
        let field_mask = of.field_mask | SOCK_ADDR_AND_FLAGS;
        Self { field_mask, sockaddr: SockAddr::of(address), flags: CLIENT_SERVER, ..of }
    }

    /// Connects back to a side that has connected.
    pub(super) fn back(conn_request: Handle, on_lost: ErrCallback) -> Self {
        const CONN_REQUEST: u64 = 1 << 6;
        let of = Self::may_be_lost(on_lost);
        Self { field_mask: of.field_mask | CONN_REQUEST, conn_request, ..of }
    }

    fn may_be_lost(on_lost: ErrCallback) -> Self {
        const ERR_HANDLING_MODE_AND_ERR_HANDLER: u64 = 1 << 1 | 1 << 2;
        const PEER: c_int = 1;
        Self {
            field_mask: ERR_HANDLING_MODE_AND_ERR_HANDLER,
            err_mode: PEER,
            err_handler: ErrHandler { call: Some(on_lost), argument: std::ptr::null_mut() },
            ..Self::default()
        }
    }
}

impl RequestParam {
    /// For host memory; returns a request even if the operation completes immediately.
    pub(super) fn of_host_memory() -> Self {
        const MEMORY_TYPE: u32 = 1 << 6;
        const NO_IMM_CMPL: u32 = 1 << 16;
        const HOST: c_int = 0;
        Self { op_attr_mask: MEMORY_TYPE | NO_IMM_CMPL, memory_type: HOST, ..Self::default() }
    }

    /// For closing an endpoint without waiting for the other side.
    pub(super) fn by_force() -> Self {
        const FLAGS: u32 = 1 << 4;
        const FORCE: u32 = 1 << 0;
        Self { op_attr_mask: FLAGS, flags: FORCE, ..Self::default() }
    }
}

macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// Addresses of the functions, by their C names.
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Functions {
            /// Resolves the functions of a library; the error is the name of a missing one.
            ///
            /// # Safety
            /// The handle must be that of a libucp that is never closed.
            // The fields determine the types; repeating them would hide a difference.
            #[allow(clippy::missing_transmute_annotations)]
            pub(super) unsafe fn resolve(library: *mut c_void) -> Result<Self, &'static str> {
                let find = |name: &'static CStr, text: &'static str| {
                    // SAFETY: a live handle, and a C string.
                    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
                    if address.is_null() { Err(text) } else { Ok(address) }
                };
                Ok(Self {$(
                    $name: {
                        const NAME: &CStr =
                            match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                                Ok(name) => name,
                                Err(_) => panic!("an identifier holds no NUL"),
                            };
                        let address = find(NAME, stringify!($name))?;
                        // SAFETY: the header declares the function of this name with this type.
                        unsafe { std::mem::transmute(address) }
                    },
                )*})
            }
        }
    };
}

functions! {
    ucp_get_version: fn(*mut c_uint, *mut c_uint, *mut c_uint);
    ucp_config_read: fn(*const c_char, *const c_char, *mut Handle) -> Status;
    ucp_config_modify: fn(Handle, *const c_char, *const c_char) -> Status;
    ucp_config_release: fn(Handle);
    ucp_init_version: fn(c_uint, c_uint, *const Params, Handle, *mut Handle) -> Status;
    ucp_worker_create: fn(Handle, *const WorkerParams, *mut Handle) -> Status;
    ucp_worker_destroy: fn(Handle);
    ucp_listener_create: fn(Handle, *const ListenerParams, *mut Handle) -> Status;
    ucp_listener_query: fn(Handle, *mut ListenerAttr) -> Status;
    ucp_worker_progress: fn(Handle) -> c_uint;
    ucp_worker_get_efd: fn(Handle, *mut c_int) -> Status;
    ucp_worker_flush_nbx: fn(Handle, *const RequestParam) -> StatusOrRequest;
    ucp_worker_arm: fn(Handle) -> Status;
    ucp_ep_create: fn(Handle, *const EpParams, *mut Handle) -> Status;
    ucp_ep_close_nbx: fn(Handle, *const RequestParam) -> StatusOrRequest;
    ucp_tag_send_nbx: fn(Handle, *const c_void, usize, u64, *const RequestParam) -> StatusOrRequest;
    ucp_tag_recv_nbx: fn(Handle, *mut c_void, usize, u64, u64, *const RequestParam) -> StatusOrRequest;
    ucp_tag_recv_request_test: fn(*mut c_void, *mut TagInfo) -> Status;
    ucp_request_check_status: fn(*mut c_void) -> Status;
    ucp_request_cancel: fn(Handle, *mut c_void);
    ucp_request_free: fn(*mut c_void);
    ucs_status_string: fn(Status) -> *const c_char;
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    /// Sizes and offsets that a C compiler reports for the headers of UCX 1.22 on a 64-bit machine.
    #[cfg(target_pointer_width = "64")]
    #[test]
    fn structures_are_laid_out_as_in_the_header() {
        assert_eq!((offset_of!(Params, features), offset_of!(Params, mt_workers_shared)), (8, 48));
        assert_eq!(size_of::<Params>(), 88);
        assert_eq!((offset_of!(WorkerParams, thread_mode), size_of::<WorkerParams>()), (8, 200));
        assert_eq!((offset_of!(ListenerParams, conn_handler), size_of::<ListenerParams>()), (40, 56));
        assert_eq!((offset_of!(ListenerAttr, sockaddr), size_of::<ListenerAttr>()), (8, 136));
        assert_eq!((offset_of!(EpParams, address), offset_of!(EpParams, err_mode)), (8, 16));
        assert_eq!((offset_of!(EpParams, sockaddr), offset_of!(EpParams, conn_request)), (56, 72));
        assert_eq!((offset_of!(EpParams, err_handler), size_of::<EpParams>()), (24, 104));
        assert_eq!((offset_of!(RequestParam, flags), offset_of!(RequestParam, memory_type)), (4, 48));
        assert_eq!(size_of::<RequestParam>(), 96);
        assert_eq!((offset_of!(TagInfo, length), size_of::<TagInfo>()), (8, 16));
    }
}
