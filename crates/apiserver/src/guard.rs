//! What is for parts of the instance is refused to everybody else.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use ate_identity::{Authority, Role};
use http::{Request, Response};
use tonic::Status;
use tonic::transport::server::{TcpConnectInfo, TlsConnectInfo};
use tower::{Layer, Service};

use crate::permission::{PERMISSIONS, Permission};

#[derive(Clone, Debug)]
pub(crate) struct GuardLayer {
    /// `None` where nobody comes but by the socket that the file system protects.
    pub(crate) authority: Option<Arc<Authority>>,
}

impl<S> Layer<S> for GuardLayer {
    type Service = Guard<S>;
    fn layer(&self, inner: S) -> Guard<S> {
        Guard { inner, authority: self.authority.clone() }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Guard<S> {
    inner: S,
    authority: Option<Arc<Authority>>,
}

impl<S> Guard<S> {
    /// Who speaks: `None` for whoever may use the socket, who may do everything.
    fn role<I>(&self, request: &Request<I>) -> Option<Result<Role, String>> {
        let tls = request.extensions().get::<TlsConnectInfo<TcpConnectInfo>>()?;
        let chain = tls.peer_certs().unwrap_or_default();
        let authority = self.authority.as_ref()?;
        Some(authority.role_of(&chain).map_err(|error| error.to_string()))
    }
}

/// Who speaks, for what is written down of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Caller(pub(crate) String);

impl Caller {
    fn of(role: Option<&Result<Role, String>>) -> Self {
        Self(match role {
            None => "socket".to_owned(),
            Some(Ok(role)) => role.to_string(),
            Some(Err(_)) => "no certificate".to_owned(),
        })
    }
}

/// Whether a certificate of this role opens what this permission stands for.
fn opens(permission: Permission, role: Option<Role>) -> bool {
    match permission {
        Permission::Route => matches!(role, Some(Role::Router | Role::Gateway)),
        Permission::Serve => role == Some(Role::Node),
        Permission::Order => false,
        Permission::Read | Permission::Actor | Permission::Administer | Permission::Wipe | Permission::Anyone => true,
    }
}

impl<S, I, O> Service<Request<I>> for Guard<S>
where
    S: Service<Request<I>, Response = Response<O>>,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    O: Default + Send + 'static,
{
    type Response = Response<O>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<I>) -> Self::Future {
        let role = self.role(&request);
        request.extensions_mut().insert(Caller::of(role.as_ref()));
        let call = request.uri().path().trim_start_matches('/');
        let permission = PERMISSIONS.iter().find(|(name, _)| *name == call).map(|(_, permission)| *permission);
        if let (Some(permission), Some(role)) = (permission, role)
            && !opens(permission, role.as_ref().ok().copied())
        {
            let caller =
                role.map_or_else(|why| format!("the caller is not ({why})"), |role| format!("the caller is {role}"));
            let refused = Status::permission_denied(format!("{call} is for parts of the instance, and {caller}"));
            return Box::pin(std::future::ready(Ok(refused.into_http())));
        }
        Box::pin(self.inner.call(request))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_is_named_by_the_way_it_came() {
        assert_eq!(Caller::of(None), Caller("socket".to_owned()));
        assert_eq!(Caller::of(Some(&Ok(Role::Cli))), Caller(Role::Cli.to_string()));
        assert_eq!(Caller::of(Some(&Err("it has none".to_owned()))), Caller("no certificate".to_owned()));
    }

    #[test]
    fn a_part_may_do_its_own_part_only() {
        assert!(opens(Permission::Route, Some(Role::Router)) && !opens(Permission::Route, Some(Role::Node)));
        assert!(opens(Permission::Serve, Some(Role::Node)) && !opens(Permission::Serve, Some(Role::Router)));
        for internal in [Permission::Route, Permission::Serve, Permission::Order] {
            assert!(!opens(internal, None) && !opens(internal, Some(Role::Cli)), "{internal:?}");
        }
    }
}
