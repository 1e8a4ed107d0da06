//! One member's connections in one group.

use super::lane::Asking;
use super::port::Port;
use super::table::Table;
use super::transfer::Transfer;
use crate::ensure;
use crate::error::Result;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Addresses and limits by which a member reaches the others of its group.
#[derive(Clone, Debug)]
pub struct Peers {
    /// Unique name of the group.
    pub group: u64,
    /// This member's rank.
    pub rank: usize,
    /// Addresses of all members' ports, by rank: `host:port`, or several, separated by commas, among which connections
    /// take turns. If one does not answer, the next one is tried.
    pub addresses: Vec<String>,
    /// Number of connections on which messages arrive from one member: several share the network better than one.
    pub streams: usize,
    /// Time in which a connection must be made.
    pub limit: Duration,
}

/// Messages between one member and the others of its group.
///
/// ```
/// use evermoe::transport::{Carrier, Links, Peers, Port};
/// use std::time::Duration;
/// let (one, other) = (Port::open(&[], None, &Carrier::Tcp)?, Port::open(&[], None, &Carrier::Tcp)?);
/// let addresses: Vec<String> = [&one, &other].map(|port| format!("127.0.0.1:{}", port.ports()[0])).into();
/// let limit = Duration::from_secs(5);
/// let peers = |rank| Peers { group: 7, rank, addresses: addresses.clone(), streams: 2, limit };
/// let (first, second) = (Links::begin(&one, peers(0))?, Links::begin(&other, peers(1))?);
/// let (mut data, mut room) = (*b"hello", [0; 8]);
/// // SAFETY: both live until both transfers are over, and nothing else touches them.
/// let (sent, came) = unsafe {
///     (first.send(data.as_mut_ptr(), 5, 1, 99)?, second.receive(room.as_mut_ptr(), 8, 0, 99)?)
/// };
/// assert_eq!((sent.wait(limit), came.wait(limit)), (Some(Ok(5)), Some(Ok(5))));
/// assert_eq!(&room[..5], b"hello");
/// # Ok::<(), evermoe::Error>(())
/// ```
#[derive(Debug)]
pub struct Links {
    table: Arc<Table>,
    streams: usize,
    asking: Mutex<HashMap<usize, Asked>>,
}

/// The connections on which messages arrive from one member.
#[derive(Debug, Default)]
struct Asked {
    connections: Vec<Arc<Asking>>,
    /// Number of requested messages.
    messages: usize,
}

impl Links {
    /// Creates the links of a new group; those of the previous group get no more connections. Connections are made when
    /// needed.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] for a rank out of range, or 0 streams.
    pub fn begin(port: &Port, peers: Peers) -> Result<Self> {
        let Peers { group, rank, addresses, streams, limit } = peers;
        let size = addresses.len();
        ensure!(
            rank < size && streams > 0,
            "Links: expected a rank below {size} and streams, got {rank} and {streams}"
        );
        let table = Table::new(group, rank, addresses, limit, port.ways());
        port.admit_to(&table);
        Ok(Self { table, streams, asking: Mutex::default() })
    }

    /// Begins to send a message; messages with one tag to one member keep their order.
    ///
    /// # Safety
    /// The memory must hold the message, unchanged, until the transfer is over or dropped.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] for a rank that is not one of the others.
    pub unsafe fn send(&self, address: *mut u8, nbytes: usize, peer: usize, tag: u64) -> Result<Transfer> {
        let item = self.table.item(address, nbytes, peer)?;
        let number = self.table.offer(item.clone(), tag);
        Ok(Transfer::new(number, item, self.table.clone()))
    }

    /// Begins to receive a message, which may be shorter than the memory for it.
    ///
    /// # Safety
    /// Nothing else may read or write the memory until the transfer is over or dropped.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] for a rank that is not one of the others.
    pub unsafe fn receive(&self, address: *mut u8, nbytes: usize, peer: usize, tag: u64) -> Result<Transfer> {
        let item = self.table.item(address, nbytes, peer)?;
        let (number, request) = self.table.expect(item.clone(), tag);
        let mut asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        let asked = asking.entry(peer).or_default();
        asked.connections.resize_with(self.streams, Arc::default);
        asked.messages += 1;
        let place = asked.messages % self.streams;
        let connection = asked.connections[place].clone();
        drop(asking);
        connection.ask(&self.table, peer, place, request);
        Ok(Transfer::new(number, item, self.table.clone()))
    }

    /// Ends all connections and transfers; other members notice immediately.
    pub fn end(&self, reason: &str) {
        self.table.end(reason);
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        self.end("this member has left the group");
    }
}
