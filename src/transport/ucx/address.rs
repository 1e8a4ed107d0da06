//! Conversion of socket addresses to and from C.

use std::io::{Error, Result};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

/// Returns the address in C's form, with the number of its bytes.
pub(super) fn to_c(address: SocketAddr) -> (libc::sockaddr_storage, libc::socklen_t) {
    // SAFETY: all of its fields may be zero.
    let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let nbytes = match address {
        SocketAddr::V4(address) => {
            // SAFETY: as above.
            let mut found: libc::sockaddr_in = unsafe { std::mem::zeroed() };
            found.sin_family = libc::AF_INET as libc::sa_family_t;
            found.sin_port = address.port().to_be();
            found.sin_addr.s_addr = u32::from_ne_bytes(address.ip().octets());
            // SAFETY: a `sockaddr_storage` has room for each kind of address.
            unsafe { (&raw mut storage).cast::<libc::sockaddr_in>().write(found) };
            size_of::<libc::sockaddr_in>()
        }
        SocketAddr::V6(address) => {
            // SAFETY: as above.
            let mut found: libc::sockaddr_in6 = unsafe { std::mem::zeroed() };
            found.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            found.sin6_port = address.port().to_be();
            found.sin6_addr.s6_addr = address.ip().octets();
            found.sin6_scope_id = address.scope_id();
            // SAFETY: as above.
            unsafe { (&raw mut storage).cast::<libc::sockaddr_in6>().write(found) };
            size_of::<libc::sockaddr_in6>()
        }
    };
    (storage, nbytes as libc::socklen_t)
}

/// Returns the address that C has written.
pub(super) fn from_c(storage: &libc::sockaddr_storage) -> Result<SocketAddr> {
    match libc::c_int::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: it holds an address of this kind.
            let found = unsafe { (&raw const *storage).cast::<libc::sockaddr_in>().read() };
            let ip = Ipv4Addr::from(found.sin_addr.s_addr.to_ne_bytes());
            Ok((ip, u16::from_be(found.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: it holds an address of this kind.
            let found = unsafe { (&raw const *storage).cast::<libc::sockaddr_in6>().read() };
            let ip = Ipv6Addr::from(found.sin6_addr.s6_addr);
            Ok(SocketAddrV6::new(ip, u16::from_be(found.sin6_port), 0, found.sin6_scope_id).into())
        }
        kind => Err(Error::other(format!("UCX: expected an IPv4 or IPv6 address, got family {kind}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_come_back() {
        for text in ["127.0.0.1:80", "10.1.2.3:65535", "[::1]:7", "[fe80::1%3]:9000"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(from_c(&to_c(address).0).unwrap(), address);
        }
    }
}
